"""Kernels for GPUs, in CUDA C++ that is compiled where it runs."""
