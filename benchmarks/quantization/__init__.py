"""Rounding on a real model: what quantization costs SmolLM2, beside what other quantizers reach."""
