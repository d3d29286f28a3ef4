"""Formats of quantized checkpoints: their settings, and whether the tensors of a module fit."""
