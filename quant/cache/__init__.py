"""The cache of packed decoder layers on disk, for the next start of a stage."""
