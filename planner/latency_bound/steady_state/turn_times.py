"""Seconds of turns of newcomers, whose prompts are as long and as unlike as by chance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import sqrt

import numpy as np

from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.steady_state.grid_times import mean_prefill_s
from planner.latency_bound.steady_state.group_sizes import GroupSizes
from planner.latency_bound.steady_state.tandem import PassTimes
from planner.length_distribution import FloatArray, LengthDistribution

GOLDEN, SILVER = (sqrt(5) - 1) / 2, sqrt(2) - 1
"""Their multiples leave remainders that are spread evenly over 0 to 1, however many are taken, so
that a few turns stand for all: what chance would give by its proportions and not at random."""
_SLOPE_STEP = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A turn of one group: the sizes of its micro-batches, none of them 0, and their seconds."""

    sizes: tuple[int, ...]
    parts: tuple[PassTimes, ...]

    @property
    def newcomers(self) -> int:
        """Number of requests that are prefilled."""
        return sum(self.sizes)


@dataclass(frozen=True, eq=False)
class TurnTimes:
    """Turns on the stages of `times`, in micro-batches of at most `most` prompts."""

    times: StageTimes
    prompts: LengthDistribution
    most: int
    _known: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def turns(self, sizes: GroupSizes) -> Iterator[Turn]:
        """Yield turns for ever, with numbers of newcomers, and lengths, in their proportions."""
        counts = [count for count, _ in sizes.newcomers]
        below = np.cumsum([chance for _, chance in sizes.newcomers])[:-1]
        part = turn = 0
        while True:
            turn += 1
            count = counts[int(np.searchsorted(below, turn * SILVER % 1, side="right"))]
            parts = -(-count // self.most)
            each = tuple(count * (i + 1) // parts - count * i // parts for i in range(parts))
            made = [self._part(size, (part + i) * GOLDEN % 1) for i, size in enumerate(each, 1)]
            part += parts
            yield Turn(each, tuple(made))

    def part(self, size: int, tokens: float) -> PassTimes:
        """A micro-batch of so many prompts, which have so many tokens together."""
        each = tokens / size
        if size == 1:
            return PassTimes.of(self.times.prefill_s(1, each), self.times.prefill_hop_s(1, each))
        mean_s, per_token_s = self._of_size(size)
        compute_s = np.maximum(mean_s + (each - self.prompts.mean) * per_token_s, mean_s / size)
        return PassTimes.of(compute_s, self.times.prefill_hop_s(size, each))

    def _part(self, size: int, share: float) -> PassTimes:
        """A micro-batch of prompts as long, in sum, as such a `share` of all do not exceed."""
        mean, at = self.prompts.mean, self.prompts.quantile(share)
        return self.part(size, size * mean + sqrt(size) * (at - mean))

    def _of_size(self, size: int) -> tuple[FloatArray, FloatArray]:
        """Mean seconds of so many prompts [N], and those of one token more in each of them [N]."""
        if size not in self._known:
            low, high = ((1 + sign * _SLOPE_STEP) * self.prompts.mean for sign in (-1, 1))
            more_s = self.times.prefill_s(size, high) - self.times.prefill_s(size, low)
            mean_s = mean_prefill_s(self.times, size, self.prompts)
            self._known[size] = mean_s, more_s / (high - low)
        return self._known[size]
