"""Measuring devices for `llmpq profile`: layer times, hops, sums, and loading."""
