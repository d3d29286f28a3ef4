"""What quantization costs a model: perplexity, indicators, calibrated checkpoints."""
