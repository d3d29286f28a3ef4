"""Clusters with more devices like those that they have."""

from __future__ import annotations

from dataclasses import replace

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec


def kinds_of_devices(cluster: ClusterSpec) -> tuple[Device, ...]:
    """A device of each kind, node and memory."""
    kinds = {(d.node, d.accelerator.name, d.memory_bytes): d for d in cluster.devices}
    return tuple(kinds.values())


def grown(cluster: ClusterSpec, kind: Device, count: int) -> ClusterSpec:
    """The cluster with `count` more devices like one of its own, on the same node."""
    of_type = [
        d.index for d in cluster.devices if (d.node, d.accelerator) == (kind.node, kind.accelerator)
    ]
    added = (replace(kind, index=max(of_type) + step) for step in range(1, count + 1))
    return replace(cluster, devices=(*cluster.devices, *added))
