"""The loss of quality by bitwidth: sensitivities, omega files, and perplexity."""
