"""Records of a job on disk: its rows and results, its model, and its lock."""
