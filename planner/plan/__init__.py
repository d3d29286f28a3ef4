"""The plan as a file holds it: built, checked, simulated, and made again."""
