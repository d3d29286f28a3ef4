"""What the server tells of its load and of the times of its answers."""
