"""Attention of a micro-batch of ragged requests over ranges of the KV cache, on GPUs and CPUs."""
