"""Measured loading of layers, hops between stages and sums of tensor-parallel groups, in files
beside the profile of layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import ray

from actors.processes.placement import DeviceRequest, place
from actors.profiling.links import measure_copies, measure_hops, measure_sums
from actors.profiling.loading import LoadTask
from actors.profiling.on_cluster import time_loading_on_cluster
from llmpq.profile.layers import Report
from planner.cluster.device import Device, Place
from planner.cluster.groups import equal_devices, group_of
from planner.cluster.spec import ClusterSpec
from planner.costs.hosting import HOST, can_host
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import DEGREES
from planner.profiles.design import ProfileOptions
from planner.profiles.links import (
    PLACES,
    LinkRow,
    LoadRow,
    SumRow,
    links_path,
    loading_path,
    read_measured,
    sums_path,
)
from planner.profiles.rows import read_table, write_table
from quant.common.errors import DeviceError


def profile_loading(
    profile: Path,
    config: Mapping[str, Any],
    shape: ModelShape,
    options: ProfileOptions,
    device: Device,
    report: Report,
) -> tuple[LoadRow, ...]:
    """Measure the loads that the file beside `profile` lacks of the model with the values `config`
    on `device`, at the bitwidths of `options`; all its rows of these. Needs an initialised Ray.
    """
    path, dtype = loading_path(profile), device.compute_dtype(options.dtype)
    threads = device.threads or 0
    own = (device.accelerator.name, shape.name, dtype, threads)

    def are_ours(rows: Iterable[LoadRow]) -> list[LoadRow]:
        """Those of a layer as large, or of some of the layers where they differ."""
        return [
            row
            for row in rows
            if (row.device, row.model, row.dtype, row.threads) == own
            and (shape.plain.kinds or row.checkpoint_bytes == 2 * shape.layer_parameters)
        ]

    rows = read_table(path, LoadRow) if path.exists() else ()
    measured = {row.bits for row in are_ours(rows)}
    todo = tuple(bits for bits in options.bits if bits not in measured)
    if todo:
        report(f"{device.accelerator.name}: loading at {', '.join(map(str, todo))} bit")
        kind = "cpu" if device.runs_on_cpu else "cuda"
        task = LoadTask(config, dtype, todo, kind, device.threads)
        rows += tuple(
            LoadRow(
                device=device.accelerator.name,
                model=shape.name,
                dtype=dtype,
                threads=threads,
                **vars(load),
            )
            for load in time_loading_on_cluster(task, device)
        )
        write_table(path, LoadRow, rows)
    return tuple(row for row in are_ours(rows) if row.bits in options.bits)


Link = tuple[str, str, Place]
"""Two kinds of accelerator in alphabetical order, and where they meet, as in `LinkRow.link`."""


def pairs(cluster: ClusterSpec) -> dict[Link, tuple[Device, Device]]:
    """Two devices that stand for all hops of their link: for each two kinds of accelerator on a
    node and on different nodes, and one twice for copies to and from a host that may hold experts.

    CPUs also meet themselves: a node takes as many such stages as it has cores.
    """
    found: dict[Link, tuple[Device, Device]] = {}
    met = [(d, d) for d in cluster.devices if d.accelerator.is_cpu]
    for one, other in [*combinations(cluster.devices, 2), *met]:
        first, second = sorted((one.accelerator.name, other.accelerator.name))
        place: Place = "node" if one.node == other.node else "network"
        found.setdefault((first, second, place), (one, other))
    for device in filter(can_host, cluster.devices):
        first, second = sorted((device.accelerator.name, HOST))
        found.setdefault((first, second, "host"), (device, device))
    return {link: found[link] for link in sorted(found)}


def profile_links(profile: Path, cluster: ClusterSpec, report: Report) -> tuple[LinkRow, ...]:
    """Measure the hops that the file beside `profile` lacks; all rows of this cluster's links.

    A pair that the Ray cluster cannot place is reported and left out. Needs an initialised Ray.
    """
    path = links_path(profile)
    rows = read_measured(path, LinkRow, cluster.own_accelerators)
    wanted = pairs(cluster)
    for link, (one, other) in wanted.items():
        if link in {row.link for row in rows}:
            continue
        first, second, place_of_hop = link
        report(f"hops between {first} and {second}, {PLACES[place_of_hop]}")
        try:
            ends = [measuring_placement(each) for each in (one, other)]
            hops = (
                measure_copies(ends[0])
                if place_of_hop == "host"
                else measure_hops(ends, place_of_hop)
            )
        except DeviceError as error:
            report(f"not measured: {error}")
            continue
        rows += tuple(
            LinkRow(sender=first, receiver=second, place=place_of_hop, **vars(hop)) for hop in hops
        )
        write_table(path, LinkRow, rows)
    return tuple(row for row in rows if row.link in wanted)


def measuring_placement(device: Device) -> Any:
    """The place of a process of one thread that sends messages from the device."""
    (found,) = place([replace(DeviceRequest.of(device), threads=1)], ray.cluster_resources())
    return found


def groups(cluster: ClusterSpec) -> dict[tuple[str, int], Device]:
    """A group of each degree for every kind of accelerator of which a node has so many."""
    found: dict[tuple[str, int], Device] = {}
    for devices in equal_devices(cluster):
        for degree in DEGREES[1:]:
            if degree <= len(devices):
                group = group_of(devices[:degree])
                found.setdefault((group.accelerator.name, degree), group)
    return {kind: found[kind] for kind in sorted(found)}


def profile_sums(profile: Path, cluster: ClusterSpec, report: Report) -> tuple[SumRow, ...]:
    """Measure the sums that the file beside `profile` lacks; all rows of this cluster's groups.

    A group that the Ray cluster cannot place is reported and left out. Needs an initialised Ray.
    """
    path = sums_path(profile)
    rows = read_measured(path, SumRow, cluster.own_accelerators)
    wanted = groups(cluster)
    for kind, group in wanted.items():
        if kind in {row.group for row in rows}:
            continue
        report(f"sums of {group.degree} {group.accelerator.name}")
        try:
            sums = measure_sums([measuring_placement(each) for each in group.ranks])
        except DeviceError as error:
            report(f"not measured: {error}")
            continue
        rows += tuple(SumRow(*kind, **vars(each)) for each in sums)
        write_table(path, SumRow, rows)
    return tuple(row for row in rows if row.group in wanted)
