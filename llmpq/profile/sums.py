"""Measured sums of tensor-parallel groups, in a file beside the profile of layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from actors.profiling.links import measure_sums
from llmpq.profile.layers import Report
from llmpq.profile.links import measuring_placement
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec, equal_devices, group_of
from planner.model.tensor_parallel import DEGREES
from planner.profiles.csv_table import write_table
from planner.profiles.links import SumRow, read_sums, sums_path
from quant.common.errors import DeviceError


def groups(cluster: ClusterSpec) -> tuple[Device, ...]:
    """A group of each degree for every kind of accelerator of which a node has so many."""
    found: dict[tuple[str, int], Device] = {}
    for group in _every_group(cluster):
        found.setdefault((group.accelerator.name, group.degree), group)
    return tuple(found[kind] for kind in sorted(found))


def _every_group(cluster: ClusterSpec) -> Iterator[Device]:
    for devices in equal_devices(cluster):
        for degree in DEGREES[1:]:
            if degree <= len(devices):
                yield group_of(devices[:degree])


def profile_sums(profile: Path, cluster: ClusterSpec, report: Report) -> tuple[SumRow, ...]:
    """Measure the sums that the file beside `profile` lacks; all rows of this cluster's groups.

    A group that the Ray cluster cannot place is reported and left out. Needs an initialised Ray.
    """
    path = sums_path(profile)
    rows = read_sums(path, cluster.own_accelerators) if path.exists() else ()
    wanted = {(group.accelerator.name, group.degree): group for group in groups(cluster)}
    for kind, group in wanted.items():
        if kind in {row.group for row in rows}:
            continue
        report(f"sums of {group.degree} {group.accelerator.name}")
        try:
            sums = measure_sums([measuring_placement(each) for each in group.ranks])
        except DeviceError as error:
            report(f"not measured: {error}")
            continue
        rows += tuple(
            SumRow(*kind, each.summed_bytes, each.seconds, each.spread, each.repetitions)
            for each in sums
        )
        write_table(path, SumRow, rows)
    return tuple(row for row in rows if row.group in wanted)
