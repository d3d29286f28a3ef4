"""The processes of a run: Ray actors around stages, their placement and their environment."""
