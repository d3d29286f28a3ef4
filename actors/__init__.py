"""Pipeline stages: weights, KV cache, sampling, micro-batch scheduling and their Ray actors."""
