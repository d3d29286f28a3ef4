"""Discrete-event simulation of one batch, its schedule and its trace."""
