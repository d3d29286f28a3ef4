"""The search around the optimiser: device orders, micro-batch sizes, remedies and baselines."""
