"""Which requests run next: one scheduling policy a file, their table, and the pipeline's driver."""
