"""Figures, metrics and traces of stages while they run."""
