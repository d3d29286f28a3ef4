"""Cluster, model and workload in; a plan of stages, bitwidths and micro-batches out."""
