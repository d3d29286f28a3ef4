"""Finding the devices of this machine or of a live Ray cluster."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable
from typing import Any

from actors.processes.device import ReportedGpu, visible_gpus
from llmpq.remote.session import joins_ray, ray_session
from planner.cluster.accelerators import find_accelerator, reported_accelerator
from planner.cluster.file import local_cpus
from planner.cluster.spec import DEFAULT_INTERNODE_GBIT_PER_S, ClusterSpec
from quant.common.errors import DeviceError, SpecError


def detect_cluster(address: str | None = None) -> ClusterSpec:
    """The GPUs of a Ray cluster (joined, `address` or RAY_ADDRESS), else of this machine.

    The network between nodes cannot be seen and is assumed: write the cluster and correct it.
    """
    if joins_ray(address):
        return _ray_cluster(address)
    return ClusterSpec.from_dict(
        {"name": "this-machine", "nodes": [local_node(platform.node() or "localhost")]}, "detected"
    )


def local_node(name: str) -> dict[str, Any]:
    """The entry of this machine in a cluster file: its NVIDIA GPUs, or its CPU without one."""
    gpus = visible_gpus()
    if gpus:
        return {"name": name, "accelerators": dict(_counts(gpus))}
    return {"name": name, **local_cpus(1)}


def _counts(gpus: Iterable[ReportedGpu]) -> Counter[str]:
    return Counter(reported_accelerator(each.name, each.memory_bytes).name for each in gpus)


def _ray_cluster(address: str | None) -> ClusterSpec:
    import ray

    with ray_session(address):
        nodes = [node for node in ray.nodes() if node["Alive"]]
        described = [d for d in (_ray_node(node) for node in nodes) if d]
    if not described:
        raise DeviceError("the Ray cluster has no GPU and no resource named after one")
    return ClusterSpec.from_dict(
        {
            "name": "ray-cluster",
            "nodes": [node | {"name": f"node{i}"} for i, node in enumerate(described)],
            "network": {"internode_gbit_per_s": DEFAULT_INTERNODE_GBIT_PER_S},
        },
        "detected",
    )


def _ray_node(node: dict[str, Any]) -> dict[str, Any] | None:
    """The entry of a Ray node, None without devices; nameless, as nodes of a machine share one."""
    resources: dict[str, float] = node["Resources"]
    counts = _by_driver(resources) if resources.get("GPU") else _by_resource_name(resources)
    return {"accelerators": dict(counts)} if counts else None


def _by_driver(resources: dict[str, float]) -> Counter[str]:
    """GPUs that Ray may use on the node, named by the node's own driver."""
    import ray

    on_node = next(r for r in resources if r.startswith("node:") and "internal" not in r)
    # A task without GPUs would see none: the variables of the node tell which ones are Ray's.
    as_node = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    options = {"num_cpus": 0, "resources": {on_node: 0.001}, "runtime_env": as_node}
    task = ray.remote(visible_gpus).options(**options)
    gpus: tuple[ReportedGpu, ...] = ray.get(task.remote(), timeout=60)
    return _counts(gpus[: int(resources["GPU"])])


def _by_resource_name(resources: dict[str, float]) -> Counter[str]:
    """Counts of the custom resources that have an accelerator's name."""
    counts: Counter[str] = Counter()
    names: dict[str, str] = {}
    for name, amount in resources.items():
        kind = None if name == "CPU" or ":" in name else _accelerator_name(name)
        if kind:
            # As written: reading the cluster warns of a name that fits several accelerators.
            counts[names.setdefault(kind, name)] = int(amount)
    return counts


def _accelerator_name(resource: str) -> str | None:
    try:
        return find_accelerator(resource).name
    except SpecError:
        return None
