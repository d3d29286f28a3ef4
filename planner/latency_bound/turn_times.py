"""Seconds of turns of newcomers, spread as chance spreads them, and of decode steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt

import numpy as np

from planner.latency_bound.group_sizes import GroupSizes
from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.tandem import PassTimes
from planner.latency_bound.timeline import mean_prefill_s
from planner.length_distribution import FloatArray, LengthDistribution

_GOLDEN, _SILVER = (sqrt(5) - 1) / 2, sqrt(2) - 1
"""Their multiples leave remainders that are spread evenly over 0 to 1, however many are taken."""
_SLOPE_STEP = 0.25


@dataclass(frozen=True, eq=False)
class Turn:
    """A turn of so many `newcomers`, and the seconds of its micro-batches."""

    newcomers: int
    parts: tuple[PassTimes, ...]


@dataclass(frozen=True, eq=False)
class TurnTimes:
    """Turns on the stages of `times`, of micro-batches of at most `most` prompts."""

    times: StageTimes
    prompts: LengthDistribution
    most: int
    _known: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def turns(self, sizes: GroupSizes) -> Iterator[Turn]:
        """Endless turns of at least one newcomer: their numbers and prompts in the proportions that
        they have by chance.
        """
        counts = [(count, chance) for count, chance in sizes.newcomers if count]
        ends = np.cumsum([chance for _, chance in counts])
        part = turn = 0
        while True:
            turn += 1
            at = ends[-1] * (turn * _SILVER % 1)
            count = counts[min(int(np.searchsorted(ends, at)), len(counts) - 1)][0]
            parts = -(-count // self.most)
            made = []
            for i in range(parts):
                part += 1
                size = count * (i + 1) // parts - count * i // parts
                made.append(self._part(size, (0.5 + part * _GOLDEN) % 1))
            yield Turn(count, tuple(made))

    def _part(self, size: int, share: float) -> PassTimes:
        """A micro-batch whose prompts are as long, in sum, as such a `share` of all do not exceed.
        """
        mean, at = self.prompts.mean, self.prompts.quantile(share)
        if size == 1:
            compute_s = self.times.prefill_s(1, at)
            return PassTimes.of(compute_s, self.times.prefill_hop_s(1, at))
        beyond = (at - mean) / sqrt(size)
        mean_s, per_token_s = self._of_size(size)
        compute_s = np.maximum(mean_s + beyond * per_token_s, mean_s / size)
        return PassTimes.of(compute_s, self.times.prefill_hop_s(size, mean + beyond))

    def _of_size(self, size: int) -> tuple[FloatArray, FloatArray]:
        """Mean seconds of so many prompts, and seconds of one token more in each of them."""
        if size not in self._known:
            low, high = ((1 + sign * _SLOPE_STEP) * self.prompts.mean for sign in (-1, 1))
            more_s = self.times.prefill_s(size, high) - self.times.prefill_s(size, low)
            mean_s = mean_prefill_s(self.times, size, self.prompts)
            self._known[size] = mean_s, more_s / (high - low)
        return self._known[size]
