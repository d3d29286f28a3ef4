"""Sets of devices: in one canonical order, and which of them cost the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import chain, groupby

from planner.cluster.device import Device


def canonical_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Sort devices so that the order in which a file has equal nodes makes no difference."""
    nodes: dict[str, list[Device]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device)
    ordered = [sorted(node, key=lambda d: (repr(d.cost_kind), d.index)) for node in nodes.values()]
    ordered.sort(key=lambda node: [repr(device.cost_kind) for device in node])
    return tuple(chain.from_iterable(ordered))


def one_fewer(devices: Sequence[Device]) -> list[tuple[Device, ...]]:
    """All sets that lack one of the devices; of sets that cost the same only one."""
    if len(devices) == 1:
        return []
    return distinct_sets(
        [device for device in devices if device is not dropped] for dropped in devices
    )


def distinct_sets(sets: Iterable[Sequence[Device]]) -> list[tuple[Device, ...]]:
    """The sets in canonical order; of those that cost the same only the first."""
    found: dict[Hashable, tuple[Device, ...]] = {}
    for devices in map(canonical_devices, sets):
        found.setdefault(cost_key(devices), devices)
    return list(found.values())


def cost_key(devices: Sequence[Device]) -> Hashable:
    """A key that is equal for sets of devices that cost the same, given in canonical order."""
    by_node = groupby(devices, key=lambda device: device.node)
    return tuple(tuple(device.cost_kind for device in node) for _, node in by_node)
