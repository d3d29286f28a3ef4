"""What bitwidths cost in quality: sensitivities, omega files, and perplexity."""
