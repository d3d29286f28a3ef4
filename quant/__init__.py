"""Bitwidth schemes, quantization, packing, kernel backends and the loader of quantized shards."""
