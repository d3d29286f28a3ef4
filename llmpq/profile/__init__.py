"""Measuring devices for `llmpq profile`: layer times, hops between stages, and loading."""
