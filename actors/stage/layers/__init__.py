"""Decoder layers of our own: what they compute between products, on GPUs and on CPUs."""
