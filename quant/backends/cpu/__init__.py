"""Kernels for CPUs: those of torch and oneDNN, and compiled loops."""
