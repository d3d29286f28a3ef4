"""Groups of equal devices of a node, which compute each layer together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from quant.common.errors import SpecError


def group_of(devices: Sequence[Device]) -> Device:
    """Make one device of `devices`; SpecError unless they are equal and of one node."""
    first, *others = devices
    if not others:
        return first
    if any(each.ranks or equality_key(each) != equality_key(first) for each in devices):
        names = ", ".join(device.name for device in devices)
        raise SpecError(f"{names} are not equal devices of one node and cannot be one group")
    return replace(first, ranks=tuple(devices))


def equality_key(device: Device) -> Hashable:
    return device.node, device.cost_kind


def ungrouped(devices: Sequence[Device]) -> tuple[Device, ...]:
    return tuple(member for device in devices for member in device.members)


def grouped_cluster(cluster: ClusterSpec, grouping: Sequence[tuple[str, ...]]) -> ClusterSpec:
    """Return the cluster with one device a group and no others; SpecError for unknown names."""
    known = {device.name: device for device in ungrouped(cluster.devices)}
    if unknown := [name for group in grouping for name in group if name not in known]:
        raise SpecError(f"cluster {cluster.name} has no device {unknown[0]}")
    groups = tuple(group_of([known[name] for name in group]) for group in grouping)
    return replace(cluster, devices=groups)


def equal_devices(cluster: ClusterSpec) -> list[tuple[Device, ...]]:
    found: dict[Hashable, list[Device]] = {}
    for device in ungrouped(cluster.devices):
        found.setdefault(equality_key(device), []).append(device)
    return [tuple(devices) for devices in found.values()]
