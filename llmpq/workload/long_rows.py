"""Rows that are much longer than the others: where they begin, and how messages name rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np

from llmpq.jobs.inputs import JobInput
from llmpq.jobs.row_database import shown_id
from llmpq.workload import LONG_ROWS, SEPARATE
from llmpq.workload.measuring import MeasuredRows
from planner.lengths import BoolArray, IntArray
from quant.common.errors import InfeasibleError, SpecError

LEAST_BELOW = 0.95
"""Share of rows that are no long ones: what many rows have is no exception."""

COST_OF_LONG = 2.0
LEAST_SAVED = 0.2
MOST_CUTS = 64
"""Cuts that are tried, evenly spaced in the tokens of the longest rows."""


@dataclass(frozen=True)
class LongRowRule:
    """What is done about long rows, one of `LONG_ROWS`, and where they begin.

    `percentile`: so many per cent of the rows, by the tokens of prompt and limit, are ordinary;
    None: the best cut, if there is one. Raises SpecError for values that do not exist.
    """

    handling: str = SEPARATE
    percentile: float | None = None

    def __post_init__(self) -> None:
        if self.handling not in LONG_ROWS:
            raise SpecError(
                f"long_rows is {self.handling!r}; it must be one of {', '.join(LONG_ROWS)}"
            )
        if self.percentile is not None and not 0 < self.percentile <= 100:
            raise SpecError(
                f"percentile is {self.percentile:g}; it must be above 0 and at most 100, such as 99"
            )


RowCut = tuple[int, float]
"""Tokens, prompt and limit together, that ordinary rows have at most, and the share of the KV
cache's tokens times time that parting them from the others saves.
"""


def cut_at(slot: int, prompts: IntArray, limits: IntArray, outputs: IntArray) -> RowCut | None:
    """The cut after rows of `slot` tokens, None where no row is longer; arrays as of `best_cut`."""
    total = prompts + limits
    above = total > slot
    if not above.any():
        return None
    share = float(outputs[above].sum() / outputs.sum())
    return slot, _saved(share, slot, int(total.max()))


def _saved(share_of_long: float, slot: int, longest: int) -> float:
    taken = (1 - share_of_long) * slot + COST_OF_LONG * share_of_long * longest
    return float(1 - taken / longest)


def best_cut(prompts: IntArray, limits: IntArray, outputs: IntArray) -> RowCut | None:
    """Where to cut off long rows, by prompts, limits and expected tokens [rows]; None: nowhere."""
    total = prompts + limits
    order = np.argsort(total, kind="stable")
    least = int(np.ceil(LEAST_BELOW * len(order)))
    ends = np.flatnonzero(np.diff(total[order])) + 1  # equal rows are on one side
    ends = ends[ends >= least]
    if len(ends) > MOST_CUTS:
        ends = ends[np.linspace(0, len(ends) - 1, MOST_CUTS).astype(np.int64)]
    longest = int(total.max())
    best: RowCut | None = None
    for end in ends:
        slot = int(total[order[end - 1]])
        share = outputs[order[end:]].sum() / outputs.sum()
        saved = _saved(float(share), slot, longest)
        if saved >= LEAST_SAVED and (best is None or saved > best[1]):
            best = slot, saved
    return best


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

    def longer_than(self, room: str) -> str:
        """A sentence on rows that become error rows."""
        return f"{self.are} longer than {room} ({self.shown}); llmpq run gives error rows for such"


def named_rows(source: JobInput, rows: MeasuredRows, chosen: BoolArray) -> NamedRows:
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
