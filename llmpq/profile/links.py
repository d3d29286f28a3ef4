"""Measured hops between stages, in a file beside the profile of layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import ray

from actors.processes.placement import place
from actors.profiling.links import MeasuredHop, measure_hops
from actors.profiling.on_cluster import DeviceRequest
from llmpq.profile.layers import Report
from planner.cluster.device import Device, Place
from planner.cluster.spec import ClusterSpec
from planner.profiles.csv_table import write_table
from planner.profiles.links import LinkRow, links_path, read_links
from quant.common.errors import DeviceError


@dataclass(frozen=True)
class Pair:
    """Two devices that stand for all hops between their kinds."""

    one: Device
    other: Device
    place: Place

    @property
    def link(self) -> tuple[str, str, Place]:
        """Both kinds in alphabetical order, and the place, as in `LinkRow.link`."""
        one, other = sorted((self.one.accelerator.name, self.other.accelerator.name))
        return one, other, self.place


def pairs(cluster: ClusterSpec) -> tuple[Pair, ...]:
    """Pairs of devices, one for each two kinds of accelerator on a node and on different nodes.

    CPUs also meet themselves: a node takes as many such stages as it has cores.
    """
    found: dict[tuple[str, str, Place], Pair] = {}
    met = [(d, d) for d in cluster.devices if d.accelerator.is_cpu]
    for one, other in [*combinations(cluster.devices, 2), *met]:
        pair = Pair(one, other, "node" if one.node == other.node else "network")
        found.setdefault(pair.link, pair)
    return tuple(found[link] for link in sorted(found))


def profile_links(profile: Path, cluster: ClusterSpec, report: Report) -> tuple[LinkRow, ...]:
    """Measure the hops that the file beside `profile` lacks; all rows of this cluster's links.

    A pair that the Ray cluster cannot place is reported and left out. Needs an initialised Ray.
    """
    path = links_path(profile)
    rows = read_links(path, cluster.own_accelerators) if path.exists() else ()
    wanted = pairs(cluster)
    for pair in wanted:
        if pair.link in {row.link for row in rows}:
            continue
        report(f"hops between {' and '.join(pair.link[:2])}, {_where(pair.place)}")
        try:
            hops = measure_hops(
                [measuring_placement(d) for d in (pair.one, pair.other)], pair.place
            )
        except DeviceError as error:
            report(f"not measured: {error}")
            continue
        rows += tuple(_link_row(pair, hop) for hop in hops)
        write_table(path, LinkRow, rows)
    links = {pair.link for pair in wanted}
    return tuple(row for row in rows if row.link in links)


def _where(place_of_hop: Place) -> str:
    return "on one node" if place_of_hop == "node" else "on different nodes"


def measuring_placement(device: Device) -> Any:
    """The place of a process of one thread that sends messages from the device."""
    (found,) = place([replace(DeviceRequest.of(device), threads=1)], ray.cluster_resources())
    return found


def _link_row(pair: Pair, hop: MeasuredHop) -> LinkRow:
    return LinkRow(
        sender=pair.one.accelerator.name,
        receiver=pair.other.accelerator.name,
        place=pair.place,
        way=hop.way,
        payload_bytes=hop.payload_bytes,
        seconds=hop.seconds,
        spread=hop.spread,
        repetitions=hop.repetitions,
    )
