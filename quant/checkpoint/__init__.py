"""Checkpoints on disk: finding, reading, checking and writing their tensors."""
