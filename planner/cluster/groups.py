"""Tensor-parallel groups of a cluster: equal devices of one node that are planned as one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from quant.common.errors import SpecError

Grouping = tuple[tuple[str, ...], ...]
"""The names of the devices of each group."""


def group_of(devices: Sequence[Device]) -> Device:
    """One device that stands for all of `devices`; a single one stays as it is.

    SpecError unless they are equal and of one node.
    """
    first, *others = devices
    if not others:
        return first
    if any(each.ranks or equality_key(each) != equality_key(first) for each in devices):
        names = ", ".join(device.name for device in devices)
        raise SpecError(f"{names} are not equal devices of one node and cannot be one group")
    return replace(first, ranks=tuple(devices))


def equality_key(device: Device) -> Hashable:
    """A key that is equal for devices that may be ranks of one group."""
    return device.node, device.cost_kind


def ungrouped(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The single devices of all groups."""
    return tuple(member for device in devices for member in device.members)


def grouped_cluster(cluster: ClusterSpec, grouping: Grouping) -> ClusterSpec:
    """The cluster with one device for each group; devices in no group are left out.

    SpecError for a name that the cluster lacks.
    """
    known = {device.name: device for device in ungrouped(cluster.devices)}
    if unknown := [name for group in grouping for name in group if name not in known]:
        raise SpecError(f"cluster {cluster.name} has no device {unknown[0]}")
    groups = tuple(group_of([known[name] for name in group]) for group in grouping)
    return replace(cluster, devices=groups)


def devices_of(cluster: ClusterSpec, grouping: Grouping) -> tuple[Device, ...]:
    """The device, or group of devices, of each tuple of names; errors as in `grouped_cluster`."""
    return grouped_cluster(cluster, grouping).devices


def ungrouped_cluster(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with every device on its own."""
    return replace(cluster, devices=ungrouped(cluster.devices))


def equal_devices(cluster: ClusterSpec) -> list[tuple[Device, ...]]:
    """The single devices by node and kind: those of one entry may be ranks of one group."""
    found: dict[Hashable, list[Device]] = {}
    for device in ungrouped(cluster.devices):
        found.setdefault(equality_key(device), []).append(device)
    return [tuple(devices) for devices in found.values()]
