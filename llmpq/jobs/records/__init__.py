"""What a job knows of itself on disk: its rows, what is done, its model, and its lock."""
