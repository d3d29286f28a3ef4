"""The cluster: devices with their memory and links, from YAML or the command line's counts."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from planner.cluster.accelerators import Accelerator, name_key
from planner.cluster.described import entry_of
from planner.cluster.device import Device, MeasuredLink, MeasuredSum
from planner.cluster.file import (
    ClusterFile,
    Emulation,
    NodeEntry,
    Source,
    local_cpus,
    parse_cluster,
    read_yaml,
)
from quant.common.errors import SpecError
from quant.common.units import GIB

DEFAULT_INTERNODE_GBIT_PER_S = 100.0  # the slower of the two networks of LLM-PQ table 3

# Seconds of a hop of a small message through torch.distributed, measured with gloo on one machine;
# between machines one network round trip is added.
LINK_LATENCY_S = 7e-5
INTERNODE_LATENCY_S = 1.2e-4


@dataclass(frozen=True)
class ClusterSpec:
    """The devices to plan for, node by node. `measured_links` and `measured_sums`, which no file
    has, come before what it says; `notes` are assumptions about names; `described` accelerators
    need not be on a node.
    """

    name: str
    devices: tuple[Device, ...]
    internode_bytes_per_s: float
    emulate: Emulation | None = None
    measured_links: tuple[MeasuredLink, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)
    described: tuple[Accelerator, ...] = field(default=(), compare=False)
    measured_sums: tuple[MeasuredSum, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise SpecError(f"cluster {self.name} has no device; add one under nodes")
        for device, count in Counter(device.name for device in self.devices).items():
            if count > 1:
                raise SpecError(
                    f"cluster {self.name} names {count} devices {device}; name nodes apart"
                )

    @classmethod
    def from_yaml(cls, path: str | Path) -> ClusterSpec:
        values, source = read_yaml(Path(path))
        return _from_values(values, source)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "cluster") -> ClusterSpec:
        return _from_values(values, Source(source))

    @classmethod
    def from_counts(
        cls,
        device_names: Sequence[str],
        device_numbers: Sequence[int],
        internode_gbit_per_s: float = DEFAULT_INTERNODE_GBIT_PER_S,
    ) -> ClusterSpec:
        """Make one node for each device type (paper's command line); CPUs share this machine."""
        if len(device_names) != len(device_numbers):
            raise SpecError(
                f"{len(device_names)} device names but {len(device_numbers)} numbers; give one each"
            )
        pairs = list(zip(device_names, device_numbers, strict=True))
        cpus = sum(count for name, count in pairs if name_key(name) == name_key("CPU"))
        local, nodes = local_cpus(cpus), list[dict[str, Any]]()
        for index, (name, count) in enumerate(pairs):
            node = local if name_key(name) == name_key("CPU") else {}
            nodes.append({**node, "name": f"node{index}", "accelerators": {name: count}})
        threads = local["threads"]
        note = (
            f"CPU: {threads} thread{'s' * (threads > 1)} and {local['memory_gib']} GiB each, by "
            "this machine; a cluster file (--cluster) says others"
        )
        notes = [note] if cpus else []
        values = {
            "name": " + ".join(f"{count}x{name}" for name, count in pairs) or "no devices",
            "nodes": nodes,
            "network": {"internode_gbit_per_s": internode_gbit_per_s},
        }
        made = cls.from_dict(values, "device names and numbers")
        return replace(made, notes=(*made.notes, *notes))

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device.node for device in self.devices))

    @property
    def price_per_hour(self) -> float | None:
        """Sum over all nodes, used or not; None where one has no price."""
        prices = {device.node: device.node_price_per_hour for device in self.devices}
        known = [price for price in prices.values() if price is not None]
        return sum(known) if len(known) == len(prices) else None

    def link_bytes_per_s(self, sender: Device, receiver: Device) -> float:
        """The rate between two devices; infinite from a device to itself."""
        if sender == receiver:
            return float("inf")
        measured = self._measured_link(sender, receiver)
        if measured is not None:
            return measured.bytes_per_s
        if sender.node == receiver.node:
            return sender.node_link_bytes_per_s(receiver)
        return self.internode_bytes_per_s

    def link_latency_s(self, sender: Device, receiver: Device) -> float:
        """Return seconds beside the bytes; 0 from a device to itself."""
        if sender == receiver:
            return 0.0
        measured = self._measured_link(sender, receiver)
        if measured is not None:
            return measured.latency_s
        return LINK_LATENCY_S if sender.node == receiver.node else INTERNODE_LATENCY_S

    def link_provenance(self, sender: Device, receiver: Device) -> str | None:
        """Name the measurement of a hop's time; None where files and datasheets give it."""
        if sender == receiver:
            return None
        found = self._measured_link(sender, receiver)
        if found is None:
            return None
        where = "of its node" if found.place == "node" else "of another node"
        return f"hop to {receiver.accelerator.name} {where} measured ({found.way}, {found.source})"

    def _measured_link(self, sender: Device, receiver: Device) -> MeasuredLink | None:
        return next((each for each in self.measured_links if each.joins(sender, receiver)), None)

    @property
    def own_accelerators(self) -> tuple[Accelerator, ...]:
        used = (each.accelerator for each in self.devices if not each.accelerator.is_registered)
        return tuple(dict.fromkeys((*self.described, *used)))

    def has_fingerprint(self, fingerprint: str) -> bool:
        """Whether a plan's `fingerprint` is this cluster's, by this version or an earlier one."""
        return fingerprint in (self.fingerprint(), self.fingerprint(with_hosts=False))

    def fingerprint(self, with_hosts: bool = True) -> str:
        """Digest what a plan depends on: devices, budgets and links, not the name or prices; hosts
        and figures of accelerators only where the cluster file states them. Earlier versions left
        out the hosts' memory (`with_hosts` False): see `has_fingerprint`.
        """
        devices = [
            [
                device.name,
                device.memory_bytes,
                device.link_bytes_per_s,
                device.threads,
                device.emulated,
                *(["stand-in"] if device.stand_in else []),
                *([list(device.member_names)] if device.ranks else []),
                *_stated_host(device, with_hosts),
            ]
            for device in self.devices
        ]
        links = [
            [link.one, link.other, link.place, link.latency_s, link.bytes_per_s]
            for link in self.measured_links
        ]
        sums = [
            [each.accelerator, each.degree, each.latency_s, each.s_per_byte]
            for each in self.measured_sums
        ]
        own = {each.accelerator for each in self.devices if not each.accelerator.is_registered}
        figures = [[each.name, _figures(each)] for each in sorted(own, key=lambda each: each.name)]
        text = json.dumps(
            [devices, self.internode_bytes_per_s, *filter(None, (links, figures, sums))]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """Write a cluster file that reads back equal; SpecError for unlike devices on a node."""
        own = {each.name: entry_of(each).stated() for each in self.own_accelerators}
        values: dict[str, Any] = {
            "name": self.name,
            **({"accelerators": own} if own else {}),
            "nodes": [
                _node_values(node, list(devices))
                for node, devices in groupby(self.devices, key=lambda device: device.node)
            ],
            "network": {"internode_gbit_per_s": _plain(self.internode_bytes_per_s * 8 / 1e9)},
        }
        if self.emulate is not None:
            values["emulate"] = self.emulate.model_dump(exclude_none=True)
        return yaml.safe_dump(values, sort_keys=False)


def _figures(accelerator: Accelerator) -> dict[str, Any]:
    values = entry_of(accelerator).stated()
    return {k: v for k, v in values.items() if k not in ("ray_type", "reported_as", "source")}


def _stated_host(device: Device, with_memory: bool) -> list[object]:
    rate, stated = device.host_link_bytes_per_s, list[object]()
    if rate != device.accelerator.host_link_bytes_per_s:
        stated += ["host link", rate]
    if device.host_threads is not None:
        stated += ["host threads", device.host_threads]
    if with_memory and device.host_memory_bytes is not None:
        stated += ["host memory", device.host_memory_bytes]
    return stated


def _from_values(values: object, source: Source) -> ClusterSpec:
    file = parse_cluster(values, source)
    entry = file.entry
    if entry.network is None and len(entry.nodes) > 1:
        raise source.error(
            [], f"{len(entry.nodes)} nodes but no network.internode_gbit_per_s; add it"
        )
    gbit = entry.network.internode_gbit_per_s if entry.network else DEFAULT_INTERNODE_GBIT_PER_S
    names = [node.name or f"node{index}" for index, node in enumerate(entry.nodes)]
    seen = set[str]()
    for index, name in enumerate(names):
        if name in seen:
            raise source.error(["nodes", index, "name"], f"a second node {name!r}; names differ")
        seen.add(name)
    return ClusterSpec(
        name=entry.name,
        devices=tuple(
            device
            for name, node in zip(names, entry.nodes, strict=True)
            for device in _node_devices(name, node, file)
        ),
        internode_bytes_per_s=float(round(gbit * 1e9 / 8)),
        emulate=entry.emulate,
        notes=file.assumptions(),
        described=file.own,
    )


def _node_devices(name: str, node: NodeEntry, file: ClusterFile) -> Iterator[Device]:
    """Make the devices of a node; Ray names only the first GPU type where a node mixes several."""
    emulate = file.entry.emulate
    kinds = [(file.find(kind), count) for kind, count in node.accelerators.items()]
    mixed = sum(not accelerator.is_cpu for accelerator, _ in kinds) > 1
    gpus = sum(count for accelerator, count in kinds if not accelerator.is_cpu)
    host = None if node.host_memory_gib is None else round(node.host_memory_gib * GIB)
    host_link = None if node.host_link_gbyte_per_s is None else _rate(node.host_link_gbyte_per_s)
    for accelerator, count in kinds:
        link = accelerator.link_bytes_per_s
        if node.link_gbyte_per_s is not None:
            link = _rate(node.link_gbyte_per_s)
        stand_in = emulate is not None and emulate.stand_in is not None
        real_gpu = not accelerator.is_cpu and emulate is None
        unnamed = real_gpu and (mixed or accelerator.ray_type is None)
        for index in range(count):
            yield Device(
                accelerator=accelerator,
                node=name,
                index=index,
                memory_bytes=_budget_bytes(node, accelerator, file),
                link_bytes_per_s=link,
                threads=(node.threads or 1) if accelerator.is_cpu else None,
                custom_resource=accelerator.name if unnamed else None,
                emulated=stand_in or (emulate is not None and not accelerator.is_cpu),
                host_memory_bytes=host,
                host_devices=count if accelerator.is_cpu else max(1, gpus),
                host_threads=node.host_threads,
                stand_in=stand_in,
                stated_host_link_bytes_per_s=host_link,
                node_price_per_hour=node.price_per_hour,
            )


def _rate(gbyte_per_s: float) -> float:
    return float(round(gbyte_per_s * 1e9))


def _budget_bytes(node: NodeEntry, accelerator: Accelerator, file: ClusterFile) -> int:
    limits = node.usable_memory_gib
    if isinstance(limits, dict):
        by_type = {file.find(kind).name: limit for kind, limit in limits.items()}
        limits = by_type.get(accelerator.name)
    if limits is None and accelerator.is_cpu:
        limits = node.memory_gib
    return accelerator.usable_memory_bytes if limits is None else round(limits * GIB)


def _node_values(node: str, devices: Sequence[Device]) -> dict[str, Any]:
    values: dict[str, Any] = {"name": node, "accelerators": {}}
    limits: dict[str, float] = {}
    for accelerator, group in groupby(devices, key=lambda device: device.accelerator):
        first, *others = list(group)
        if any(_traits(other) != _traits(first) for other in others):
            raise SpecError(
                f"node {node} has {accelerator.name} devices of different memory or links, which a "
                "cluster file cannot say; give each a node of its own"
            )
        values["accelerators"][accelerator.name] = 1 + len(others)
        if accelerator.is_cpu:
            values["threads"] = first.threads
        if first.memory_bytes != accelerator.usable_memory_bytes:
            limits[accelerator.name] = _plain(first.memory_bytes / GIB)
        if first.host_memory_bytes is not None:
            values["host_memory_gib"] = _plain(first.host_memory_bytes / GIB)
        if first.host_threads is not None:
            values["host_threads"] = first.host_threads
    if limits:
        values["usable_memory_gib"] = limits
    if any(device.link_bytes_per_s != device.accelerator.link_bytes_per_s for device in devices):
        links = {device.link_bytes_per_s for device in devices}
        values["link_gbyte_per_s"] = _only_rate(node, "link", links)
    stated = {device.stated_host_link_bytes_per_s for device in devices}
    if stated != {None}:
        values["host_link_gbyte_per_s"] = _only_rate(node, "host link", stated)
    price = devices[0].node_price_per_hour
    if price is not None:
        values["price_per_hour"] = _plain(price)
    return values


def _only_rate(node: str, what: str, rates: Collection[float | None]) -> float | int:
    rate, *others = rates
    if rate is None or others:
        raise SpecError(
            f"node {node} has {len(rates)} {what} rates; a cluster file can say only one"
        )
    return _plain(rate / 1e9)


_traits = attrgetter(
    "memory_bytes",
    "link_bytes_per_s",
    "threads",
    "host_memory_bytes",
    "host_threads",
    "stated_host_link_bytes_per_s",
)


def _plain(number: float) -> float | int:
    return int(number) if number == int(number) else number


def kinds_of_devices(cluster: ClusterSpec) -> tuple[Device, ...]:
    kinds = {(d.node, d.accelerator.name, d.memory_bytes): d for d in cluster.devices}
    return tuple(kinds.values())


def grown(cluster: ClusterSpec, kind: Device, count: int) -> ClusterSpec:
    of_type = [
        d.index for d in cluster.devices if (d.node, d.accelerator) == (kind.node, kind.accelerator)
    ]
    added = (replace(kind, index=max(of_type) + step) for step in range(1, count + 1))
    return replace(cluster, devices=(*cluster.devices, *added))
