"""Rows of an input that a message names: the first few, by place, id and lengths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np

from llmpq.jobs.inputs import JobInput
from llmpq.jobs.row_database import shown_id
from llmpq.workload.measuring import MeasuredRows
from planner.lengths import BoolArray
from quant.common.errors import InfeasibleError

SHOWN_ROWS = 3

USUAL_PERCENTILE = 99
"""What a message offers, or of fewer than a hundred rows the one that leaves out the longest."""

MUCH_LONGER = 1.25
"""The longest row over those of that percentile, from which on it is worth a sentence."""


@dataclass(frozen=True)
class NamedRows:
    """`count` rows, of which `shown` names the first few with their lengths."""

    count: int
    shown: str

    @property
    def are(self) -> str:
        """The number as the beginning of a sentence."""
        return "1 row is" if self.count == 1 else f"{self.count} rows are"


def named_rows(source: JobInput, rows: MeasuredRows, chosen: BoolArray) -> NamedRows:
    """The `chosen` ones [rows] of the `rows` of `source`."""
    found = rows.where(chosen)
    first = dict(zip(found.places.tolist(), range(SHOWN_ROWS), strict=False))
    ids = (
        (placed.place, placed.row.custom_id) for placed in source.rows() if placed.place in first
    )
    shown = [
        f"{source.place_name(place)}: {shown_id(custom_id)} with "
        f"{found.prompts[first[place]]} + {found.limits[first[place]]} tokens"
        for place, custom_id in islice(ids, len(first))
    ]
    return NamedRows(len(found), "; ".join(shown) + ("; …" if len(found) > len(shown) else ""))


def longest_row(source: JobInput, rows: MeasuredRows, chosen: BoolArray) -> str | None:
    """A sentence on the longest of the `chosen` rows [rows], which every slot has room for, and
    what to do about it; None where the others are as long.
    """
    total = np.where(chosen, rows.total, 0)
    longest = int(total.argmax())
    count = int(chosen.sum())
    percentile = min(USUAL_PERCENTILE, 100 * (count - 1) // count)
    usual = tokens_at(percentile, rows, chosen)
    if percentile < 1 or total[longest] < MUCH_LONGER * usual:
        return None
    only = np.arange(len(total)) == longest
    return (
        f"every slot has room for the longest row, {named_rows(source, rows, only).shown}; "
        f"{percentile} % of the rows have at most {usual} tokens with their answers: --percentile "
        f"{percentile} plans for these"
    )


def tokens_at(percentile: float, rows: MeasuredRows, chosen: BoolArray) -> int:
    """The tokens, with answers, that so many per cent of the `chosen` rows [rows] have at most."""
    total = np.sort(rows.total[chosen])
    return int(total[max(0, int(np.ceil(len(total) * percentile / 100)) - 1)])


@contextmanager
def naming(longest: str | None) -> Iterator[None]:
    """Add a sentence on the `longest` row to the error for a plan that does not fit."""
    try:
        yield
    except InfeasibleError as error:
        if longest is None:
            raise
        raise InfeasibleError(f"{error}; {longest}") from error
