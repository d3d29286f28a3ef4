"""One pipeline stage: its part of the model, its sampling, and its specification."""
