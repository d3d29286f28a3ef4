"""A device of a cluster: its memory budget, the processor that computes, and its compute type."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from planner.cluster.accelerators import Accelerator
from quant.common.errors import SpecError
from quant.scheme import DTYPE_BYTES, Processor

CUDA_CONTEXT_BYTES = 600 * 2**20
"""Memory that a process takes on a GPU before any tensor: CUDA context and workspaces of libraries.
300 to 550 MiB are usual for CUDA 11 to 13 with cuBLAS and cuDNN; recorded decode steps add some 10
to 100 (`planner.costs.memory.graph_bytes`)."""


CPU_TOKENS_AT_ONCE = 1024
"""Tokens that a CPU passes through a layer at once: of a larger micro-batch the requests follow one
another, as intermediate results would leave the cores' caches (64 prompts of 16 to 512 tokens at
once took 1.5 times as long)."""


@dataclass(frozen=True)
class Slowdown:
    """Measured seconds of a device in each phase, as multiples of the modelled ones."""

    prefill: float = 1.0
    decode: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.prefill < float("inf") and 0 < self.decode < float("inf")):
            raise SpecError(
                f"a device takes {self.prefill} and {self.decode} times its modelled seconds; give "
                "finite numbers above 0"
            )


AS_MODELLED = Slowdown()


@dataclass(frozen=True)
class Device:
    """An accelerator of a node, or a tensor-parallel group of equal ones (`ranks`, empty for one),
    whose other fields are those of its first rank. `index` counts devices of a type on the node;
    `memory_bytes` is the process's budget (for CPUs and emulated devices net of all but the model);
    link rates are in one direction. `custom_resource` is the Ray resource for a type that Ray does
    not know. An `emulated` device computes on the host's CPU with the times of `accelerator`; with
    `stand_in` a small model does, while bytes and types are the accelerator's. `host_memory_bytes`
    and `node_price_per_hour` are the node's, as are `host_threads`, where they are stated;
    `host_devices` of it share its host, on a CPU as many CPUs. `slowdown` is measured by a run.
    """

    accelerator: Accelerator
    node: str
    index: int
    memory_bytes: int
    link_bytes_per_s: float
    threads: int | None = None
    custom_resource: str | None = None
    emulated: bool = False
    host_memory_bytes: int | None = None
    stand_in: bool = False
    stated_host_link_bytes_per_s: float | None = None
    slowdown: Slowdown = AS_MODELLED
    node_price_per_hour: float | None = None
    ranks: tuple[Device, ...] = ()
    host_devices: int = 1
    host_threads: int | None = None

    @property
    def name(self) -> str:
        """Return the name, unique in the cluster, of the first rank: `node0/T4-16GB:1`."""
        return f"{self.node}/{self.accelerator.name}:{self.index}"

    @property
    def degree(self) -> int:
        return max(1, len(self.ranks))

    @property
    def members(self) -> tuple[Device, ...]:
        return self.ranks or (self,)

    @property
    def member_names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.members)

    @property
    def label(self) -> str:
        """Return the name for people, with all numbers of a group: `node0/T4-16GB:0+1`."""
        numbers = "+".join(str(device.index) for device in self.members)
        return f"{self.node}/{self.accelerator.name}:{numbers}"

    @property
    def neighbours(self) -> int:
        """How many other CPUs of the node compute beside a CPU; GPUs do not share what they use."""
        return self.host_devices - 1 if self.accelerator.is_cpu else 0

    @cached_property
    def time_kind(self) -> Hashable:
        slowdown = self.slowdown.prefill, self.slowdown.decode
        kind: tuple[Hashable, ...] = (
            *(self.accelerator.name, self.threads, self.emulated, self.stand_in, slowdown),
        )
        if self.accelerator.is_cpu:
            kind += (self.neighbours,)
        elif self.host_memory_bytes is not None:
            kind += (self.host_devices, self.host_threads, self.host_link_bytes_per_s)
        if not self.ranks:
            return kind
        return *kind, self.degree, self.link_bytes_per_s, self.host_link_bytes_per_s

    @cached_property
    def cost_kind(self) -> Hashable:
        links = self.link_bytes_per_s, self.host_link_bytes_per_s
        return self.time_kind, self.memory_bytes, links, self.host_memory_bytes

    @property
    def host_link_bytes_per_s(self) -> float:
        if self.stated_host_link_bytes_per_s is not None:
            return self.stated_host_link_bytes_per_s
        return self.accelerator.host_link_bytes_per_s

    def node_link_bytes_per_s(self, other: Device) -> float:
        """Return the rate to another device of the node: NVLink joins only GPUs of one type."""
        links = [self.link_bytes_per_s, other.link_bytes_per_s]
        if self.accelerator != other.accelerator:
            links += [self.host_link_bytes_per_s, other.host_link_bytes_per_s]
        return min(links)

    def with_faster_links(self, times: float) -> Device:
        return replace(
            self,
            link_bytes_per_s=self.link_bytes_per_s * times,
            stated_host_link_bytes_per_s=self.host_link_bytes_per_s * times,
        )

    @property
    def runs_on_cpu(self) -> bool:
        return self.accelerator.is_cpu or (self.emulated and not self.stand_in)

    @property
    def processor(self) -> Processor:
        return Processor() if self.runs_on_cpu else self.accelerator.processor

    @property
    def runtime_bytes(self) -> int:
        return 0 if self.runs_on_cpu else CUDA_CONTEXT_BYTES

    @property
    def default_dtype(self) -> str:
        return "bfloat16" if self.runs_on_cpu else self.accelerator.default_dtype

    def compute_dtype(self, requested: str = "auto") -> str:
        """Return the compute type; SpecError for an unknown one, or one it could only emulate."""
        if requested == "auto":
            return self.default_dtype
        if requested not in DTYPE_BYTES:
            raise SpecError(
                f"compute type {requested!r} is not one of auto, {', '.join(DTYPE_BYTES)}"
            )
        if requested == "bfloat16" and not self.runs_on_cpu and not self.accelerator.bf16:
            raise SpecError(
                f"{self.name} has no bfloat16 arithmetic; use float16, float32 or auto as dtype"
            )
        return requested


Place = Literal["node", "network", "host"]
"""Whether a hop is between two devices of one node, or of two nodes."""

Way = Literal["nccl", "gloo", "ray", "copy"]


@dataclass(frozen=True)
class MeasuredLink:
    """A link measured between two types of accelerators; `source` names the file."""

    one: str
    other: str
    place: Place
    way: Way
    latency_s: float
    bytes_per_s: float
    source: str = ""

    def joins(self, sender: Device, receiver: Device) -> bool:
        place = "node" if sender.node == receiver.node else "network"
        names = sorted((sender.accelerator.name, receiver.accelerator.name))
        return (names, place) == ([self.one, self.other], self.place)

    def faster(self, times: float) -> MeasuredLink:
        return replace(self, bytes_per_s=self.bytes_per_s * times)


@dataclass(frozen=True)
class MeasuredSum:
    """A measured all-reduce of a type: latency, and seconds per byte of the summed tensor."""

    accelerator: str
    degree: int
    latency_s: float
    s_per_byte: float
    source: str = ""

    def seconds(self, summed_bytes: float) -> float:
        return self.latency_s + summed_bytes * self.s_per_byte
