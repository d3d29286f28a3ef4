"""Faults, spoiled input, and what is left behind."""
