"""Kernel backends for CPUs."""
