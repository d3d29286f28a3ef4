"""Measured sums of tensor-parallel groups, in a CSV file beside the profile, and lines fitted to
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from planner.cluster.accelerators import Accelerator, find_accelerator
from planner.cluster.device import MeasuredSum
from planner.model.tensor_parallel import DEGREES
from planner.profiles.csv_table import read_table, table_beside, write_table
from planner.profiles.links import AcceleratorName, Count, PositiveSeconds, fitted_line
from quant.common.errors import SpecError


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class SumRow:
    """A measured all-reduce: median `seconds` in which `degree` devices of a node sum a tensor of
    `summed_bytes` in 16 bits, so that each has the sum.

    `spread`: interquartile range over the median of `repetitions`.
    """

    accelerator: AcceleratorName
    degree: Annotated[int, Field(ge=2, le=max(DEGREES))]
    summed_bytes: Count
    seconds: PositiveSeconds
    spread: Annotated[float, Field(ge=0)]
    repetitions: Count

    @property
    def group(self) -> tuple[str, int]:
        """The kind of group that was measured."""
        return self.accelerator, self.degree


def sums_path(profile: str | Path) -> Path:
    """The path of the sums that were measured with a profile."""
    return table_beside(profile, "sums")


def read_sums(path: Path, own: Iterable[Accelerator] = ()) -> tuple[SumRow, ...]:
    """Read every row; SpecError names file and line of the first bad one. `own` are the
    accelerators of the cluster file, which rows may name too.
    """
    rows = read_table(path, SumRow)
    for index, row in enumerate(rows):
        try:
            find_accelerator(row.accelerator, own)
        except SpecError as error:
            place = f"{path}:{index + 2}"
            raise SpecError(f"{place}: accelerator is {row.accelerator!r}: {error}") from error
    return rows


def write_sums(path: Path, rows: Iterable[SumRow]) -> None:
    """Write rows so that `read_sums` gives them back."""
    write_table(path, SumRow, rows)


def sums_beside(profile: str | Path, own: Iterable[Accelerator] = ()) -> tuple[MeasuredSum, ...]:
    """Fit the sums that were measured with a profile; none where there is no file of them."""
    path = sums_path(profile)
    return fit_sums(read_sums(path, own), path.name) if path.exists() else ()


def fit_sums(rows: Sequence[SumRow], source: str = "") -> tuple[MeasuredSum, ...]:
    """Fit latency and seconds per byte of each kind of group.

    One that was measured with a single size is left out.
    """
    found = []
    for group in sorted({row.group for row in rows}):
        own = [row for row in rows if row.group == group]
        sizes = [row.summed_bytes for row in own]
        if len(set(sizes)) > 1:
            found.append(
                MeasuredSum(*group, *fitted_line(sizes, [row.seconds for row in own]), source)
            )
    return tuple(found)
