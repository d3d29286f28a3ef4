"""Measured times of layers, links and loading, and the fits to them."""
