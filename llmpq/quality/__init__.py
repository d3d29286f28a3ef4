"""The cost of quantization in quality: perplexity, indicators, calibrated checkpoints."""
