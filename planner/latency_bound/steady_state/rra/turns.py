"""Turns of newcomers, whose prompts are as long and as unlike as by chance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

import numpy as np

from planner.latency_bound.steady_state.prompt_times import PromptTimes
from planner.latency_bound.steady_state.rra.group_sizes import GroupSizes
from planner.latency_bound.steady_state.tandem import PassTimes

GOLDEN, SILVER = (sqrt(5) - 1) / 2, sqrt(2) - 1
"""Their multiples leave remainders that are spread evenly over 0 to 1, however many are taken, so
that a few turns stand for all: what chance would give by its proportions and not at random."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A turn of one group: the sizes of its micro-batches, none of them 0, and their seconds."""

    sizes: tuple[int, ...]
    parts: tuple[PassTimes, ...]

    @property
    def newcomers(self) -> int:
        """Number of requests that are prefilled."""
        return sum(self.sizes)


def turns(times: PromptTimes, most: int, sizes: GroupSizes) -> Iterator[Turn]:
    """Yield turns for ever, with numbers of newcomers, and lengths, in their proportions, in
    micro-batches of at most `most` prompts.
    """
    counts = [count for count, _ in sizes.newcomers]
    below = np.cumsum([chance for _, chance in sizes.newcomers])[:-1]
    part = turn = 0
    while True:
        turn += 1
        count = counts[int(np.searchsorted(below, turn * SILVER % 1, side="right"))]
        parts = -(-count // most)
        each = tuple(count * (i + 1) // parts - count * i // parts for i in range(parts))
        made = [_part(times, size, (part + i) * GOLDEN % 1) for i, size in enumerate(each, 1)]
        part += parts
        yield Turn(each, tuple(made))


def _part(times: PromptTimes, size: int, share: float) -> PassTimes:
    """A micro-batch of prompts as long, in sum, as such a `share` of all do not exceed."""
    mean, at = times.prompts.mean, times.prompts.quantile(share)
    return times.part(size, size * mean + sqrt(size) * (at - mean))
