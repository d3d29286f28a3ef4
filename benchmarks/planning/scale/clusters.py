"""The clusters that plans are made for: left-over GPUs of four generations."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

from planner.cluster.spec import ClusterSpec

NODES = (("T4", 4), ("P100", 4), ("V100-SXM2-32GB", 2), ("A100-40GB", 2))
"""Nodes of a grown cluster, again and again: a type, and how many of it."""

INTERNODE_GBIT_PER_S = 25
SPECS = Path("cluster_specs")


def grown_cluster(devices: int) -> ClusterSpec:
    """So many GPUs of the four types on nodes of 4 or 2."""
    nodes = []
    for number, (name, count) in enumerate(cycle(NODES)):
        if devices <= 0:
            break
        nodes.append({"name": f"node{number}", "accelerators": {name: min(count, devices)}})
        devices -= count
    values = {
        "name": "grown",
        "nodes": nodes,
        "network": {"internode_gbit_per_s": INTERNODE_GBIT_PER_S},
    }
    return ClusterSpec.from_dict(values)


def single_gpu_nodes() -> ClusterSpec:
    """Sixteen machines with one GPU each, of four types, on a slow network."""
    kinds = ("T4", "V100-SXM2-32GB", "P100", "A100-40GB")
    nodes = [{"name": f"pc{n}", "accelerators": {kinds[n % 4]: 1}} for n in range(16)]
    values = {"name": "sixteen", "nodes": nodes, "network": {"internode_gbit_per_s": 10}}
    return ClusterSpec.from_dict(values)


def mixed_clusters() -> dict[str, ClusterSpec]:
    """Three clusters of unlike devices, by what they are."""
    return {
        "4 T4, 2 V100, A100, L4 on 3 nodes": ClusterSpec.from_yaml(SPECS / "t4_v100_a100.yaml"),
        "16 nodes of one GPU, 4 types": single_gpu_nodes(),
        "24 GPUs of 4 types on 8 nodes": ClusterSpec.from_yaml(SPECS / "mixed_24.yaml"),
    }
