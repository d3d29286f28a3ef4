"""Measuring layers, links and loading on the devices of a cluster, in Ray tasks."""
