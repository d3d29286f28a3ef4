"""Measured loading times of decoder layers, in a CSV file beside the profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from planner.plan.spec import PlanSpec, StagePlan
from planner.profiles.csv_table import table_beside
from quant.scheme import BITWIDTHS, DTYPE_BYTES, FULL_BITS

Origin = Literal["checkpoint", "cache"]
"""The source of a layer: 16-bit weights that are quantized, or the cache of packed layers."""


def _bitwidth(bits: int) -> int:
    if bits not in BITWIDTHS:
        raise ValueError(f"a bitwidth is one of {', '.join(map(str, BITWIDTHS))}")
    return bits


_Count = Annotated[int, Field(ge=1, le=2**53)]


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
    checkpoint_bytes: _Count
    held_bytes: _Count
    repetitions: _Count


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
