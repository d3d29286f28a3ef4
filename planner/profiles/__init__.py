"""Measured times of layers, links and loading, and latency models fitted to them."""
