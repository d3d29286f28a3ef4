"""A stage as a group of ranks: the modules that they share out, and the orders of rank 0."""
