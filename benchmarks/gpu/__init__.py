"""Everything that only a GPU can measure, as one command; see `__main__`."""
