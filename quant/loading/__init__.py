"""Filling the modules of a stage with quantized weights."""
