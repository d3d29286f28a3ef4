"""One pipeline stage: its part of the model, its sampling, and what it is told."""
