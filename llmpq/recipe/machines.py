"""The machines of a recipe, and the Ray nodes on each: those of a cluster file that a plan uses."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from planner.cluster.accelerators import Accelerator
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from quant.common.errors import SpecError
from quant.common.units import GIB

_MAKERS = "(nvidia |amd )?(tesla |quadro )?"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class RayNode:
    """Devices of one type on a machine, which are a node of Ray by themselves: what Ray calls a
    GPU is the same on the whole node. `cpus`: cores that its CPU devices compute with.
    """

    kind: Accelerator
    count: int
    cpus: int
    emulated: bool

    @property
    def gpus(self) -> int:
        return 0 if self.emulated or self.kind.is_cpu else self.count

    @property
    def resources(self) -> dict[str, int]:
        """Ray's resource by which stages find their type."""
        return {} if self.kind.is_cpu else {self.kind.name: self.count}

    @property
    def start_words(self) -> tuple[str, ...]:
        """The options of `ray start` that say what the node has."""
        words = (f"--num-cpus={self.cpus}", f"--num-gpus={self.gpus}")
        resources = json.dumps(self.resources)
        return (*words, f"--resources={resources}") if self.resources else words

    @property
    def driver_names(self) -> str:
        """A pattern of what the driver calls the GPU, in small or capital letters."""
        names = dict.fromkeys([self.kind.name, *self.kind.aliases, *self.kind.reported_as])
        plain = (re.sub(r"^(nvidia|amd|tesla|quadro)[-_ ]", "", each, flags=re.I) for each in names)
        parts = (re.split(r"[-_ ]", re.escape(each).replace("\\", "")) for each in plain)
        patterns = dict.fromkeys("[-_ ]".join(map(re.escape, part)) for part in parts)
        return f"{_MAKERS}({'|'.join(patterns)})"

    def label(self, given: dict[str, str], usual: str) -> str:
        return given.get(self.kind.name, usual)


@dataclass(frozen=True)
class Machine:
    """`memory_bytes` of the whole machine, where the cluster file says it."""

    name: str
    nodes: tuple[RayNode, ...]
    memory_bytes: int | None
    threads: int | None

    @property
    def has_mixed_gpus(self) -> bool:
        return sum(node.gpus > 0 for node in self.nodes) > 1

    @property
    def about(self) -> str:
        devices = ", ".join(f"{node.count} x {node.kind.name}" for node in self.nodes)
        memory = "" if self.memory_bytes is None else f", {self.memory_bytes / GIB:.4g} GiB"
        return f"{self.name}: {devices}{memory}"


def machines_of(cluster: ClusterSpec, used: Collection[str] | None = None) -> tuple[Machine, ...]:
    """The machines of `cluster` with the devices that are named in `used`, of all where it is None;
    those without any are left out. SpecError for names that shells and DNS do not take.
    """
    devices = [each for each in cluster.devices if used is None or each.name in used]
    by_node = groupby(devices, key=attrgetter("node"))
    return tuple(_machine(name, list(group)) for name, group in by_node)


def alike(machines: Collection[Machine]) -> Iterator[tuple[Machine, ...]]:
    """Groups of machines that are asked for in one way, in the order of their first ones."""
    groups: dict[object, list[Machine]] = {}
    for machine in machines:
        groups.setdefault((machine.nodes, machine.memory_bytes, machine.threads), []).append(
            machine
        )
    yield from map(tuple, groups.values())


def _machine(name: str, devices: list[Device]) -> Machine:
    if _NAME.fullmatch(name) is None:
        raise SpecError(
            f"node {name!r:.80} of the cluster file is no name of a host; recipes need letters, "
            "digits, dots and dashes alone"
        )
    by_kind = groupby(devices, key=lambda each: (each.accelerator, each.emulated))
    nodes = tuple(_ray_node(list(group)) for _, group in by_kind)
    first = devices[0]
    memory = first.host_memory_bytes
    if memory is None and all(node.kind.is_cpu for node in nodes):
        memory = sum(each.memory_bytes for each in devices)
    return Machine(name, nodes, memory, first.host_threads)


def _ray_node(devices: list[Device]) -> RayNode:
    first = devices[0]
    own = first.accelerator.is_cpu and not first.emulated
    cpus = sum(each.threads or 1 for each in devices) if own else 0
    return RayNode(first.accelerator, len(devices), cpus, first.emulated)
