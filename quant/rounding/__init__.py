"""Choosing codes, scales and zeros for the weights of a matrix."""
