"""Seconds of a pipeline's stages for a pass of any size, the stages that serve passes first come,
first served, and the timeline of a schedule.

A search asks for thousands of sizes and lengths, fractions among them, since sizes are means: times
are taken one by one, or on a grid of sizes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import sqrt
from typing import Literal, Protocol

import numpy as np

from planner.lengths import FloatArray, IntArray, LengthDistribution
from planner.schedule.static import UNDER_WAY_PER_STAGE
from planner.simulation.simulation import passed_s

_Work = Literal["prefill", "decode", "attention"]


class StageSeconds(Protocol):
    """Seconds [N] of a pass on each stage and the link behind it; `requests` is any number from 1,
    `context_tokens` of each request before the new one. The last link leads to the first stage.
    """

    @property
    def stages(self) -> int: ...

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray: ...

    def attention_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        """The part of those seconds that is attention's; the rest is by their tokens together."""

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray: ...

    def prefill_hop_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        """Seconds of the transfers behind the stages for the prompts of a micro-batch."""

    def decode_hop_s(self, requests: float) -> FloatArray: ...


_PROMPT_CLASSES = 12
"""Classes of equal numbers in which prompts are timed, each at its mean length."""

_REQUEST_BITS, _LENGTH_BITS = 6, 5
"""Of the numbers on the grid: all up to 64 requests and 32 tokens, then 32 and 16 an octave.
Between them a roofline is off by its kinks alone, by 0.1 % in the mean of the stages."""

_HIGHEST_REQUESTS, _HIGHEST_LENGTH = 1 << 16, 1 << 17
"""Beyond these numbers time goes on as before them."""


class ManyTimes(ABC):
    @abstractmethod
    def mean_prefill_s(self, requests: float, prompts: LengthDistribution) -> FloatArray: ...

    @abstractmethod
    def decodes_s(
        self, requests: FloatArray, context_tokens: FloatArray
    ) -> tuple[FloatArray, FloatArray]: ...


class GridTimes(ManyTimes):
    """The times `exact` on a grid of requests and tokens, linear between; transfers as there."""

    def __init__(self, exact: StageSeconds) -> None:
        self.stages, self.prefill_hop_s = exact.stages, exact.prefill_hop_s
        self._prefill, self._decode = _Grid(exact.prefill_s), _Grid(exact.decode_s)
        self._attention = _Grid(exact.attention_s)
        self.prefill_s, self.decode_s = self._prefill.one, self._decode.one
        self.attention_s = self._attention.one
        self._one_hop_s = exact.decode_hop_s(1.0)
        self._more_hop_s = exact.decode_hop_s(2.0) - self._one_hop_s
        self._means: dict[tuple[float, LengthDistribution], FloatArray] = {}

    def decode_hop_s(self, requests: float) -> FloatArray:
        return np.asarray(self._one_hop_s + (requests - 1) * self._more_hop_s)

    def mean_prefill_s(self, requests: float, prompts: LengthDistribution) -> FloatArray:
        key = requests, prompts
        if key not in self._means:
            self._means[key] = _mean_s(requests, prompts, self._prefill.at, self._attention.at)
        return self._means[key]

    def decodes_s(
        self, requests: FloatArray, context_tokens: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        compute_s = self._decode.at(requests, context_tokens)
        return compute_s, self._one_hop_s + (requests - 1)[:, None] * self._more_hop_s


def decodes_s(
    times: StageSeconds, requests: FloatArray, context_tokens: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Compute and transfer seconds of decode steps [n], both [n, N]."""
    if isinstance(times, ManyTimes):
        return times.decodes_s(requests, context_tokens)
    sizes = requests.tolist()
    compute_s = map(times.decode_s, sizes, context_tokens.tolist())
    return np.array(list(compute_s)), np.array(list(map(times.decode_hop_s, sizes)))


def mean_prefill_s(times: StageSeconds, requests: float, prompts: LengthDistribution) -> FloatArray:
    """Mean compute seconds [N] of a micro-batch of so many prompts of these lengths."""
    if isinstance(times, ManyTimes):
        return times.mean_prefill_s(requests, prompts)
    alike, attention = _one_by_one(times.prefill_s), _one_by_one(times.attention_s)
    return _mean_s(requests, prompts, alike, attention)


_SecondsAt = Callable[[FloatArray, FloatArray], FloatArray]
"""Seconds [n, N] of passes with so many requests and tokens each [n]."""


def _mean_s(
    requests: float, prompts: LengthDistribution, prefill_at: _SecondsAt, attention_at: _SecondsAt
) -> FloatArray:
    """Mean seconds [N] of unlike prompts: the rest by mean length, attention of each length."""
    tokens, shares = _classes(prompts)
    sizes = np.full(len(tokens), requests)
    means = prompts.mean + (tokens - prompts.mean) / sqrt(requests)
    rest_s = prefill_at(sizes, means) - attention_at(sizes, means)
    return np.asarray(shares @ (rest_s + attention_at(sizes, tokens)))


def _one_by_one(seconds: Callable[[float, float], FloatArray]) -> _SecondsAt:
    def at(requests: FloatArray, tokens: FloatArray) -> FloatArray:
        return np.array([seconds(*each) for each in zip(requests, tokens, strict=True)])

    return at


def rounds_s(compute_s: FloatArray, hop_s: FloatArray, groups: float | FloatArray) -> FloatArray:
    """Seconds [n] of rounds of so many groups, each of which makes a step [n, N]."""
    busiest_s = groups * np.maximum(compute_s, hop_s).max(axis=1)
    return np.asarray(np.maximum(busiest_s, (compute_s + hop_s).sum(axis=1)))


class _Grid:
    def __init__(self, seconds: Callable[[float, float], FloatArray]) -> None:
        self._seconds = seconds
        self._place = np.full((len(_REQUESTS), len(_LENGTHS)), -1, dtype=np.int32)
        self._known: list[FloatArray] = []
        self._rows: FloatArray = np.empty((0, 0))

    def at(self, requests: FloatArray, tokens: FloatArray) -> FloatArray:
        """Seconds [n, N] of passes with so many requests and tokens each [n]."""
        row, beyond_row = _below(_REQUESTS, requests)
        column, beyond_column = _below(_LENGTHS, tokens)
        above, right = row + (beyond_row > 0), column + (beyond_column > 0)
        rows = np.concatenate([row, row, above, above])
        columns = np.concatenate([column, right, column, right])
        places = self._place[rows, columns]
        if places.min() < 0:
            self._fill(rows[places < 0], columns[places < 0])
            places = self._place[rows, columns]
        low_low, low_high, high_low, high_high = self._rows[places].reshape(4, len(row), -1)
        across, along = beyond_column[:, None], beyond_row[:, None]
        low = low_low + across * (low_high - low_low)
        high = high_low + across * (high_high - high_low)
        return np.asarray(low + along * (high - low))

    def one(self, requests: float, tokens: float) -> FloatArray:
        """Seconds [N] of one such pass."""
        return np.asarray(self.at(np.array([requests]), np.array([tokens]))[0])

    def _fill(self, rows: IntArray, columns: IntArray) -> None:
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            if self._place[row, column] < 0:
                self._place[row, column] = len(self._known)
                self._known.append(self._seconds(_REQUESTS[row], _LENGTHS[column]))
        self._rows = np.array(self._known)


def _numbers(highest: int, bits: int) -> FloatArray:
    found, number = list[int](), 1
    while number <= highest:
        found.append(number)
        number += 1 << max(0, number.bit_length() - bits)
    return np.array(found, dtype=np.float64)


_REQUESTS = _numbers(_HIGHEST_REQUESTS, _REQUEST_BITS)
_LENGTHS = _numbers(_HIGHEST_LENGTH, _LENGTH_BITS)


def _below(grid: FloatArray, values: FloatArray) -> tuple[IntArray, FloatArray]:
    """The places of the grid's numbers below these values, and how far beyond, in parts of the way
    to the next.
    """
    values = np.maximum(values, 1.0)
    place = np.minimum(grid.searchsorted(values, side="right") - 1, len(grid) - 2)
    return place, (values - grid[place]) / (grid[place + 1] - grid[place])


@lru_cache(maxsize=64)
def _classes(prompts: LengthDistribution) -> tuple[FloatArray, FloatArray]:
    tokens, shares = zip(*prompts.classes(_PROMPT_CLASSES), strict=True)
    return np.array(tokens), np.array(shares)


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
    """A schedule in its steady state. `admission_wait_s`: from turn to turn of a group, the longest
    wait where fewer requests come than are served. `latency_s` [longest output + 1]: mean by the
    tokens of an answer.
    """

    performance: Performance
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
        free_s = self._stage_free_s, self._link_free_s
        at_s = passed_s(at_s, times.compute_s, times.hop_s, *free_s)
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


def unlimited() -> None:
    """Time is never up."""
