"""What quantization costs in quality: perplexity and divergence of models."""
