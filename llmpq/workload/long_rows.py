"""A few rows that are much longer than the others: where they begin, by the KV cache of the job.

A KV slot has room for the row with the most tokens of prompt and limit together, so that one long
row makes all slots long and leaves memory for fewer of them. While a row generates, it holds a
slot; the KV tokens of a slot, times the tokens generated in it, are what a job takes of the KV
cache. Rows beyond a cut are planned by themselves, and the two parts then take

    share below · slot below + 2 · share above · slot above

of it a generated token, where shares are of generated tokens. Long rows count twice: few fill a
pipeline worse, and stages start once more for them. Cuts at 95 % of the rows or more, by the tokens
of prompt and output together, are tried; the best one is made if it saves a fifth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmpq.workload.defaults import LONG_ROWS, SEPARATE
from planner.lengths import IntArray
from quant.common.errors import SpecError

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


@dataclass(frozen=True)
class Cut:
    """Rows of at most `total` tokens, prompt and limit together, are ordinary.

    `saved`: share of the KV cache's tokens times time that parting them saves.
    """

    total: int
    saved: float


def cut_at(slot: int, prompts: IntArray, limits: IntArray, outputs: IntArray) -> Cut | None:
    """The cut after rows of `slot` tokens, None where no row is longer; arrays as of `best_cut`."""
    total = prompts + limits
    above = total > slot
    if not above.any():
        return None
    share = float(outputs[above].sum() / outputs.sum())
    return Cut(slot, _saved(share, slot, int(total.max())))


def _saved(share_of_long: float, slot: int, longest: int) -> float:
    taken = (1 - share_of_long) * slot + COST_OF_LONG * share_of_long * longest
    return float(1 - taken / longest)


def best_cut(prompts: IntArray, limits: IntArray, outputs: IntArray) -> Cut | None:
    """The cut between ordinary and long rows, None where none saves enough.

    Prompt tokens, most new tokens and expected ones of each row [rows].
    """
    total = prompts + limits
    order = np.argsort(total, kind="stable")
    least = int(np.ceil(LEAST_BELOW * len(order)))
    ends = np.flatnonzero(np.diff(total[order])) + 1  # equal rows are on one side
    ends = ends[ends >= least]
    if len(ends) > MOST_CUTS:
        ends = ends[np.linspace(0, len(ends) - 1, MOST_CUTS).astype(np.int64)]
    longest = int(total.max())
    best: Cut | None = None
    for end in ends:
        slot = int(total[order[end - 1]])
        share = outputs[order[end:]].sum() / outputs.sum()
        saved = _saved(float(share), slot, longest)
        if saved >= LEAST_SAVED and (best is None or saved > best.saved):
            best = Cut(slot, saved)
    return best
