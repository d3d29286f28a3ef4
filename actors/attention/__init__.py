"""Attention of a micro-batch of ragged requests over their KV slots, on GPUs and on CPUs."""
