"""What is measured beside layers, each in a CSV file beside the profile: hops between stages and
sums within groups, with lines fitted to them, and loading.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from planner.cluster.accelerators import Accelerator, find_accelerator
from planner.cluster.device import MeasuredLink, MeasuredSum, Place, Way
from planner.model.tensor_parallel import DEGREES
from planner.plan.spec import PlanSpec, StagePlan
from planner.profiles.rows import read_table, table_beside
from quant.common.errors import SpecError
from quant.scheme import BITWIDTHS, DTYPE_BYTES, FULL_BITS

WAYS: tuple[Way, ...] = ("nccl", "gloo", "ray")
"""The transports between stages; runs prefer the first that there is. A device's memory and its
host's, the place `host`, are joined by a `copy`.
"""

PLACES = {"node": "on one node", "network": "on two nodes", "host": "device and host"}


def _full_name(name: str) -> str:
    """The registry's name, or that of an accelerator that a cluster file describes."""
    try:
        return find_accelerator(name).name
    except SpecError:
        return name


AcceleratorName = Annotated[str, AfterValidator(_full_name)]
PositiveSeconds = Annotated[float, Field(gt=0, lt=1e6)]
Count = Annotated[int, Field(ge=1, le=2**53)]
_Row = TypeVar("_Row", "LinkRow", "SumRow")


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class LinkRow:
    """A measured hop: median `seconds` for hidden states of `payload_bytes`, half of a round trip
    with packing and copies. `spread`: interquartile range over the median of `repetitions`.
    """

    ACCELERATORS: ClassVar = ("sender", "receiver")

    sender: AcceleratorName
    receiver: AcceleratorName
    place: Place
    way: Way
    payload_bytes: Count
    seconds: PositiveSeconds
    spread: Annotated[float, Field(ge=0)]
    repetitions: Count

    @property
    def link(self) -> tuple[str, str, Place]:
        one, other = sorted((self.sender, self.receiver))
        return one, other, self.place


def links_path(profile: str | Path) -> Path:
    return table_beside(profile, "links")


def read_measured(
    path: Path, kind: type[_Row], own: Iterable[Accelerator] = ()
) -> tuple[_Row, ...]:
    """Read every link or sum, which may name `own` accelerators; SpecError names the first bad one,
    and there is none without the file.
    """
    rows = read_table(path, kind) if path.exists() else ()
    for index, row in enumerate(rows):
        for column in kind.ACCELERATORS:
            name = getattr(row, column)
            try:
                find_accelerator(name, own)
            except SpecError as error:
                place = f"{path}:{index + 2}"
                raise SpecError(f"{place}: {column} is {name!r}: {error}") from error
    return rows


def links_beside(profile: str | Path, own: Iterable[Accelerator] = ()) -> tuple[MeasuredLink, ...]:
    """Fit the links that were measured with a profile; none where there is no file of them."""
    path = links_path(profile)
    return fit_links(read_measured(path, LinkRow, own), path.name)


def fit_links(rows: Sequence[LinkRow], source: str = "") -> tuple[MeasuredLink, ...]:
    """Fit each link by the transport that runs prefer; one measured with a single payload has no
    rate and is left out.
    """
    found = []
    for link in sorted({row.link for row in rows}):
        own = [row for row in rows if row.link == link]
        way = next(way for way in (*WAYS, "copy") if any(row.way == way for row in own))
        own = [row for row in own if row.way == way]
        if len({row.payload_bytes for row in own}) < 2:
            continue
        payloads = [row.payload_bytes for row in own]
        latency_s, per_byte_s = fitted_line(payloads, [row.seconds for row in own])
        found.append(MeasuredLink(*link, way, latency_s, 1 / max(per_byte_s, 1e-15), source))
    return tuple(found)


def fitted_line(payload_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit the seconds without bytes, and those of a byte, with least relative errors."""
    from scipy.optimize import nnls  # slow to import, and few plans need it

    payload, measured = np.array(payload_bytes, dtype=np.float64), np.array(seconds)
    unit = float(payload.max())  # so that both columns are of one magnitude
    matrix = np.stack([1 / measured, payload / unit / measured], axis=1)
    (latency_s, per_unit_s), _ = nnls(matrix, np.ones(len(measured)))
    return float(latency_s), float(per_unit_s) / unit


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class SumRow:
    """A measured all-reduce: median `seconds` of `degree` devices of a node, in 16-bit numbers."""

    ACCELERATORS: ClassVar = ("accelerator",)

    accelerator: AcceleratorName
    degree: Annotated[int, Field(ge=2, le=max(DEGREES))]
    summed_bytes: Count
    seconds: PositiveSeconds
    spread: Annotated[float, Field(ge=0)]
    repetitions: Count

    @property
    def group(self) -> tuple[str, int]:
        return self.accelerator, self.degree


def sums_path(profile: str | Path) -> Path:
    return table_beside(profile, "sums")


def sums_beside(profile: str | Path, own: Iterable[Accelerator] = ()) -> tuple[MeasuredSum, ...]:
    """Fit the sums that were measured with a profile; none where there is no file of them."""
    path = sums_path(profile)
    return fit_sums(read_measured(path, SumRow, own), path.name)


def fit_sums(rows: Sequence[SumRow], source: str = "") -> tuple[MeasuredSum, ...]:
    """Fit latency and seconds per byte of each kind of group measured with several sizes."""
    found = []
    for group in sorted({row.group for row in rows}):
        own = [row for row in rows if row.group == group]
        sizes = [row.summed_bytes for row in own]
        if len(set(sizes)) > 1:
            found.append(
                MeasuredSum(*group, *fitted_line(sizes, [row.seconds for row in own]), source)
            )
    return tuple(found)


Origin = Literal["checkpoint", "cache"]
"""The source of a layer: 16-bit weights that are quantized, or the cache of packed layers."""


def _bitwidth(bits: int) -> int:
    if bits not in BITWIDTHS:
        raise ValueError(f"a bitwidth is one of {', '.join(map(str, BITWIDTHS))}")
    return bits


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class LoadRow:
    """A measured load of a layer from files in the system's cache: median `seconds`; `threads` is 0
    where no property.
    """

    device: str
    model: str
    dtype: str
    threads: Annotated[int, Field(ge=0)]
    bits: Annotated[int, AfterValidator(_bitwidth)]
    backend: str
    origin: Origin
    seconds: Annotated[float, Field(gt=0)]
    checkpoint_bytes: Count
    held_bytes: Count
    repetitions: Count


def loading_path(profile: str | Path) -> Path:
    return table_beside(profile, "loading")


def loading_s(
    rows: Sequence[LoadRow], plan: PlanSpec, layer_bytes: int, origin: Origin
) -> float | None:
    """Predict the seconds until the slowest stage has loaded its layers of `layer_bytes` in 16
    bits, by their size, from a fast disk; None where a stage's device or bitwidth was not measured.
    """
    slowest_s = 0.0
    for stage in plan.stages:
        seconds = [
            _per_byte_s(rows, stage, bits, "checkpoint" if bits == FULL_BITS else origin)
            for bits in stage.bitwidths
        ]
        if None in seconds:
            return None
        slowest_s = max(slowest_s, layer_bytes * sum(each or 0.0 for each in seconds))
    return slowest_s


def _per_byte_s(
    rows: Sequence[LoadRow], stage: StagePlan, bits: int, origin: Origin
) -> float | None:
    found = [
        row.seconds / row.checkpoint_bytes
        for row in rows
        if (row.device, row.bits, row.origin) == (stage.accelerator, bits, origin)
        and DTYPE_BYTES.get(row.dtype) == DTYPE_BYTES[stage.dtype]
        and row.threads in (0, stage.threads)
    ]
    return median(found) if found else None
