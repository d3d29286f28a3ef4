"""All that a GPU is needed for to be measured, as one command; see `__main__`."""
