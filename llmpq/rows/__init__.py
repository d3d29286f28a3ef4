"""The prompts of a batch and their results, row by row."""
