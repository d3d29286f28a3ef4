"""The devices of a run, reserved with Ray all together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.processes.placement import Placement
from actors.processes.ray_head import LOOK_S, check_head, ended_process
from quant.common.errors import DeviceError

GRANT_S = 5.0
"""Seconds within which free devices are granted: Ray takes tenths of one."""


class Reservation:
    """One placement group for the stages that need resources, so that two jobs cannot halve a
    cluster; `placements` has one for each stage.

    Raises `DeviceError` where Ray does not grant them within `limit_s`.
    """

    def __init__(self, placements: Sequence[Placement], limit_s: float) -> None:
        self.placements = tuple(placements)
        self._group: PlacementGroup | None = None
        bundles = [placement.bundle for placement in placements if placement.bundle]
        if not bundles:
            return
        self._group = placement_group(bundles, strategy="PACK")
        try:
            granted = _is_granted(self._group, limit_s)
        except BaseException:
            self.release()
            raise
        if not granted:
            self.release()
            raise DeviceError(
                f"Ray did not grant {bundles} within {limit_s:g} s: the "
                f"devices exist but are in use, or no node has those of a stage together; "
                f"free now: {ray.available_resources()}"
            )

    def actor_options(self, stage: int) -> dict[str, Any]:
        """Options for Ray to start the actor of `stage` with, so that it has what is reserved."""
        placement = self.placements[stage]
        options: dict[str, Any] = {
            "num_cpus": placement.num_cpus,
            "num_gpus": placement.num_gpus,
            "resources": dict(placement.resources),
        }
        if self._group is not None and placement.bundle:
            before = sum(bool(each.bundle) for each in self.placements[:stage])
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=before
            )
        return options

    def has_device(self, stage: int) -> bool:
        """Whether the cluster has what `stage` needs, free or not; other stages keep theirs."""
        offered = ray.cluster_resources()
        wanted: Counter[str] = Counter()
        for placement in self.placements:
            wanted.update(placement.bundle)
        mine = self.placements[stage].bundle
        if not all(offered.get(name, 0.0) >= wanted[name] - 1e-9 for name in mine):
            return False
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return any(all(node.get(name, 0.0) >= mine[name] - 1e-9 for name in mine) for node in nodes)

    def release(self) -> None:
        """Give all back; where Ray itself is gone there is nobody to take it, nor any need."""
        if self._group is not None and ended_process() is None:
            remove_placement_group(self._group)
        self._group = None


class ReservedPart:
    """The part of a `reservation` for several plans that one of them has: so many `stages`, from
    number `first` on. Who made the reservation gives it back.
    """

    def __init__(self, reservation: Reservation, first: int, stages: int) -> None:
        self.placements = reservation.placements[first : first + stages]
        self._reservation, self._first = reservation, first

    def actor_options(self, stage: int) -> dict[str, Any]:
        return self._reservation.actor_options(self._first + stage)

    def has_device(self, stage: int) -> bool:
        return self._reservation.has_device(self._first + stage)

    def release(self) -> None:
        """Give nothing back."""


def copies_granted(placements: Sequence[Placement], most: int, limit_s: float = GRANT_S) -> int:
    """How many copies of all `placements`, up to `most`, Ray grants together; all given back."""
    with ExitStack() as held:
        for copies in range(most):
            try:
                reservation = Reservation(placements, limit_s)
            except DeviceError:
                check_head()
                return copies
            held.callback(reservation.release)
    return most


def _is_granted(group: PlacementGroup, limit_s: float) -> bool:
    ends_s = time.monotonic() + limit_s
    while not group.wait(min(LOOK_S, limit_s)):
        check_head()
        if time.monotonic() > ends_s:
            return False
    return True
