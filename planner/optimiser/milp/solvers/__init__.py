"""Solvers of integer programmes: one file and one entry in `table` each."""
