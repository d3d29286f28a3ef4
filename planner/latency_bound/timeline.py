"""Performance, timelines, and the stages that serve passes first come, first served."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from planner.latency_bound.stage_times import StageSeconds, mean_prefill_s
from planner.lengths import FloatArray, LengthDistribution
from planner.schedule.static import UNDER_WAY_PER_STAGE


@dataclass(frozen=True)
class Performance:
    """Requests per second in the steady state, and latency in seconds at the bounded quantile."""

    requests_per_s: float
    latency_s: float

    def keeps(self, bound_s: float) -> bool:
        """Whether latency is within the bound; what has no room keeps none."""
        return self.latency_s <= bound_s and self.latency_s < math.inf


DOES_NOT_FIT = Performance(0.0, math.inf)
"""A schedule whose requests have no room in memory."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """A schedule in its steady state. A turn begins every `cycle_s` in each group;
    `decode_requests` (B_D) decode at the beginning of a phase, `admission_wait_s` is the longest
    wait for a turn where fewer come than are served. `latency_s` [longest output + 1]: mean by the
    tokens of an answer.
    """

    performance: Performance
    mean_latency_s: float
    cycle_s: float
    decode_requests: float
    admission_wait_s: float
    latency_s: FloatArray

    def latency_of(self, output_tokens: int) -> float:
        return float(self.latency_s[min(output_tokens, len(self.latency_s) - 1)])


def mixed_quantile(
    means: FloatArray, deviations: FloatArray, chances: FloatArray, share: float
) -> float:
    """The value not exceeded by such a share of normal distributions, each with its chance."""
    from scipy.special import ndtr  # takes a tenth of a second, which commands do not wait for

    spread = np.maximum(deviations, 1e-9 * float(means.max()))
    low, high = float((means - 9 * spread).min()), float((means + 9 * spread).max())
    for _ in range(40):
        middle = (low + high) / 2
        if float(np.dot(chances, ndtr((middle - means) / spread))) < share:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True, slots=True, eq=False)
class PassTimes:
    compute_s: Sequence[float]
    hop_s: Sequence[float]

    @classmethod
    def of(cls, compute_s: FloatArray, hop_s: FloatArray) -> PassTimes:
        """The same as lists, with which sums of few are quicker."""
        return cls(compute_s.tolist(), hop_s.tolist())

    @property
    def alone_s(self) -> float:
        """Seconds of a pass that waits nowhere."""
        return sum(self.compute_s) + sum(self.hop_s)

    @property
    def busiest_s(self) -> float:
        """Seconds of the slowest stage or link."""
        return max(*self.compute_s, *self.hop_s)


class Tandem:
    """A pipeline of stages with at most so many passes under way as the runtime allows."""

    def __init__(self, stages: int) -> None:
        self._stage_free_s = [0.0] * stages
        self._link_free_s = [0.0] * stages
        most = UNDER_WAY_PER_STAGE * stages
        self._backs_s = deque([0.0] * most, most)

    def run(self, times: PassTimes, ready_s: float) -> float:
        """Run a pass that is ready then; returns when it is back."""
        at_s = max(ready_s, self._backs_s[0])
        stage_free_s, link_free_s = self._stage_free_s, self._link_free_s
        hops = zip(times.compute_s, times.hop_s, strict=True)
        for j, (compute_s, hop_s) in enumerate(hops):
            free_s = stage_free_s[j]
            stage_free_s[j] = at_s = (free_s if free_s > at_s else at_s) + compute_s
            free_s = link_free_s[j]
            link_free_s[j] = at_s = (free_s if free_s > at_s else at_s) + hop_s
        self._backs_s.append(at_s)
        return at_s

    @property
    def open_s(self) -> float:
        """When the next pass may be under way."""
        return self._backs_s[0]


@lru_cache(maxsize=64)
def even_shares(count: int, seed: int = 0) -> FloatArray:
    """So many shares, evenly spread over 0 to 1."""
    return np.random.default_rng(seed).permutation((np.arange(count) + 0.5) / count)


def poisson_numbers(mean: float, count: int) -> list[int]:
    """So many numbers of what happens by chance, so often in the mean."""
    from scipy.special import pdtr  # takes a tenth of a second, which commands do not wait for

    most = int(mean + 8 * np.sqrt(mean) + 8)
    found = np.searchsorted(pdtr(np.arange(most), mean), even_shares(count, 1))
    return [int(each) for each in found]


_SLOPE_STEP = 0.25


@dataclass(frozen=True, eq=False)
class PromptTimes:
    times: StageSeconds
    prompts: LengthDistribution
    _known: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def part(self, size: int, tokens: float) -> PassTimes:
        each = tokens / size
        if size == 1:
            return PassTimes.of(self.times.prefill_s(1, each), self.times.prefill_hop_s(1, each))
        mean_s, per_token_s = self._of_size(size)
        compute_s = np.maximum(mean_s + (each - self.prompts.mean) * per_token_s, mean_s / size)
        return PassTimes.of(compute_s, self.times.prefill_hop_s(size, each))

    def _of_size(self, size: int) -> tuple[FloatArray, FloatArray]:
        """Mean seconds of so many prompts [N], and those of one token more in each of them [N]."""
        if size not in self._known:
            low, high = ((1 + sign * _SLOPE_STEP) * self.prompts.mean for sign in (-1, 1))
            more_s = self.times.prefill_s(size, high) - self.times.prefill_s(size, low)
            mean_s = mean_prefill_s(self.times, size, self.prompts)
            self._known[size] = mean_s, more_s / (high - low)
        return self._known[size]
