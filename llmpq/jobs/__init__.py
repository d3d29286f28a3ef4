"""A batch as a job: prompts as a stream, every result committed once, and resuming."""
