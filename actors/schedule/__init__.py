"""Which requests run next: one scheduling policy a file, and the driver of a pipeline."""
