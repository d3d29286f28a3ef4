"""What the stages tell of themselves while they run."""
