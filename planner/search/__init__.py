"""The search around the optimiser: device orders, micro-batches, remedies and baselines."""
