"""Turns of newcomers, whose prompts are as long and as unlike as by chance."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import sqrt

import numpy as np

from planner.latency_bound.steady_state.prompt_times import PromptTimes
from planner.latency_bound.steady_state.rra.group_sizes import GroupSizes
from planner.latency_bound.steady_state.tandem import PassTimes
from planner.schedule.turns import even_parts
from planner.scheduling import RequestSchedule

GOLDEN, SILVER = (sqrt(5) - 1) / 2, sqrt(2) - 1
"""Their multiples leave remainders that are spread evenly over 0 to 1, however many are taken, so
that a few turns stand for all: what chance would give by its proportions and not at random."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A turn of one group: the sizes of its micro-batches, none of them 0, and their seconds."""

    sizes: list[int]
    parts: list[PassTimes]

    @property
    def newcomers(self) -> int:
        """Number of requests that are prefilled."""
        return sum(self.sizes)


class NewcomersTurns:
    """Turns of a schedule with numbers of newcomers, and lengths, in their proportions."""

    def __init__(self, times: PromptTimes, schedule: RequestSchedule, sizes: GroupSizes) -> None:
        self._times, self._most = times, schedule.prefill_micro_batch
        self._below = [np.cumsum(each)[:-1].tolist() for each in sizes.newcomers]
        self._totals = sizes.newcomers.sum(axis=1).tolist()
        self._turns, self._parts = [0, 0], 0
        prompts = times.prompts
        self._even = schedule.tolerance * prompts.mean / max(sqrt(prompts.variance), _ROUNDING)

    def next(self, is_empty: bool) -> Turn:
        """The next turn of a group, which has requests or none.

        Micro-batches have prompts as long, in sum, as a share of all do not exceed, and turns of
        several newcomers are as unlike as the tolerance allows (`planner.schedule.turns.evened`).
        """
        self._turns[is_empty] += 1
        share = self._turns[is_empty] * SILVER % 1 * self._totals[is_empty]
        count = bisect_right(self._below[is_empty], share)
        if not count:
            return Turn([], [])
        sizes = even_parts(count, self._most)
        more = [sqrt(size) * self._longer() for size in sizes]
        kept = min(1.0, self._even * sqrt(count)) if count > 1 else 1.0
        each = self._times.prompts.mean - (1 - kept) * sum(more) / count
        tokens = [size * each + longer for size, longer in zip(sizes, more, strict=True)]
        return Turn(sizes, list(map(self._times.part, sizes, tokens)))

    def _longer(self) -> float:
        """By how many tokens the next prompt is longer than the mean one."""
        self._parts += 1
        prompts = self._times.prompts
        return prompts.quantile(self._parts * GOLDEN % 1) - prompts.mean
