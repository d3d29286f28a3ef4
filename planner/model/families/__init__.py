"""The model families that can be planned and run: one file each, and their entries in `table`."""
