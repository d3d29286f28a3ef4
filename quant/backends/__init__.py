"""Kernel backends: one file each, which packs a weight and multiplies with it."""
