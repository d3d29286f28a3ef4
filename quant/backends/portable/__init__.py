"""Kernel backends in pure torch, for every device."""
