"""Processes that are measured together, each placed and started as a stage on its device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.processes.environment import stage_environment
from actors.processes.placement import CRUMB, Placement
from actors.profiling.on_cluster import bare_errors
from actors.transport.rendezvous import CONTROL
from planner.cluster.device import Place
from quant.common.errors import DeviceError

_PLACING_S = 60.0


@contextmanager
def started_together(kind: type, ends: Sequence[Placement], place: Place) -> Iterator[list[Any]]:
    """Actors of this `kind` with the devices of `ends`, on one node or each on another.

    Each is told whether its device is a GPU. They are gone when it ends. Needs an initialised Ray.
    Raises `DeviceError` where the cluster has no such place, or a process dies.
    """
    bundles = [_bundle(end) for end in ends]
    group = placement_group(bundles, "STRICT_PACK" if place == "node" else "STRICT_SPREAD")
    actors: list[Any] = []
    try:
        if not group.wait(_PLACING_S):
            where = "one node" if place == "node" else f"{len(ends)} nodes"
            raise DeviceError(f"Ray did not grant {bundles} on {where} within {_PLACING_S:g} s")
        with bare_errors():
            for index, end in enumerate(ends):
                strategy = PlacementGroupSchedulingStrategy(group, index)
                actors.append(_start(kind, end, strategy))
            yield actors
    except RayActorError as error:
        raise DeviceError(f"a process died while it was measured: {error}") from error
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def median_and_spread(seconds: Sequence[float]) -> tuple[float, float]:
    """The median, and the interquartile range over it."""
    low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75))
    return float(middle), float((high - low) / middle)


def _bundle(end: Placement) -> dict[str, float]:
    """The resources of a stage there, but a crumb of a CPU: messages do not keep threads busy."""
    return {**end.bundle, "CPU": CRUMB}


def _start(kind: type, end: Placement, strategy: PlacementGroupSchedulingStrategy) -> Any:
    make_remote: Any = ray.remote  # its annotations lack concurrency groups
    remote: Any = make_remote(concurrency_groups={CONTROL: 1})(kind).options(
        num_cpus=CRUMB,
        num_gpus=end.num_gpus,
        resources=dict(end.resources),
        runtime_env={"env_vars": stage_environment(end.threads)},
        scheduling_strategy=strategy,
    )
    return remote.remote(end.num_gpus > 0)
