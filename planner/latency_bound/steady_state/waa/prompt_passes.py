"""Turns of prompts on the stages that prefill (WAA): how many requests these can serve, and for how
long a prompt is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np

from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.steady_state.draws import even_shares
from planner.latency_bound.steady_state.prompt_times import PromptTimes
from planner.latency_bound.steady_state.tandem import Tandem
from planner.latency_bound.steady_state.waa.prefill_queue import PrefillQueue
from planner.length_distribution import FloatArray, LengthDistribution
from planner.schedule.prefills import SHORT_PROMPTS, WAITING, PrefillSizes
from planner.schedule.turns import evened
from planner.scheduling import RequestSchedule

_PROMPTS, _PARTS = 1024, 64
"""Prompts that stand for all, and the fewest micro-batches of them."""

_CLASSES = 16
"""Classes of micro-batches by how long they are under way."""

SETTLING = 0.25
"""Share of the passes that are run before any are counted."""


@lru_cache(maxsize=256)
def representative_prompts(prompts: LengthDistribution, size: int) -> tuple[int, ...]:
    """Prompts, enough for some micro-batches of `size`, with lengths in their proportions and in an
    order without any.
    """
    shares = even_shares(max(_PROMPTS, _PARTS * size))
    return tuple(prompts.quantile(share) for share in shares.tolist())


class Part(NamedTuple):
    """A micro-batch of so many prompts, which have so many tokens together: when it was submitted,
    and when it is back.
    """

    requests: int
    tokens: int
    began_s: float
    back_s: float


@dataclass(frozen=True, eq=False)
class PartTimes:
    """Seconds of micro-batches from their submission until they are back, in classes [n], and the
    shares of requests in these [n].
    """

    seconds: FloatArray
    shares: FloatArray

    @classmethod
    def of(cls, parts: Sequence[Part]) -> PartTimes:
        """The times of some, once stages are full."""
        kept = parts[int(SETTLING * len(parts)) :]
        seconds = np.array([part.back_s - part.began_s for part in kept])
        sizes = np.array([float(part.requests) for part in kept])
        classes = np.array_split(np.argsort(seconds), min(len(kept), _CLASSES))
        means = [np.average(seconds[each], weights=sizes[each]) for each in classes]
        shares = np.array([sizes[each].sum() for each in classes])
        return cls(np.array(means), shares / shares.sum())

    @property
    def mean_s(self) -> float:
        """Mean seconds of a request."""
        return float(self.shares @ self.seconds)


@dataclass(frozen=True, eq=False)
class BusyPrefills:
    """Stages on which prompts wait all the time: requests per second, the variance of how many come
    in some time over their mean, and their micro-batches.
    """

    requests_per_s: float
    dispersion: float
    parts: PartTimes


class PromptPasses:
    """Passes of representative prompts through the stages of `times`, which have copies in them."""

    def __init__(
        self, times: StageTimes, prompts: LengthDistribution, schedule: RequestSchedule
    ) -> None:
        self._schedule = schedule
        self._times = PromptTimes(times, prompts)
        self._queue = PrefillQueue(PrefillSizes.of(schedule, prompts.longest))
        self.prompts = representative_prompts(prompts, schedule.prefill_micro_batch)
        self._next = 0
        self._tandem = Tandem(times.stages)
        self._most_parts = times.stages + WAITING
        self._most = self._most_parts * schedule.prefill_requests
        self._under_way: deque[Part] = deque()
        self.requests = 0

    @property
    def next_s(self) -> float:
        """When the oldest micro-batch is back."""
        return self._under_way[0].back_s if self._under_way else inf

    def turn(self, most: float) -> int:
        """Have the requests of a turn wait, at most so many; returns how many these are."""
        share = self._schedule.prefill_requests
        room = int(min(most, self._most - self.requests, SHORT_PROMPTS * share))
        if room < 1:
            return 0
        begin = self._next % len(self.prompts)
        ahead = self.prompts[begin : begin + room]
        ahead += self.prompts[: room - len(ahead)]
        count = evened(self._schedule, min(share, room), room, ahead)
        self._queue.add(ahead[:count])
        self._next += count
        self.requests += count
        return count

    def submit(self, now_s: float) -> None:
        """Submit what may be under way."""
        while len(self._queue) and len(self._under_way) < self._most_parts:
            taken = self._queue.take()
            requests, tokens = len(taken), sum(taken)
            back_s = self._tandem.run(self._times.part(requests, tokens), now_s)
            self._under_way.append(Part(requests, tokens, now_s, back_s))

    def take_back(self) -> Part:
        """The oldest micro-batch, which is back."""
        part = self._under_way.popleft()
        self.requests -= part.requests
        return part


def busy_prefills(
    times: StageTimes, prompts: LengthDistribution, schedule: RequestSchedule
) -> BusyPrefills:
    """What stages do where as many prompts wait as may."""
    passes = PromptPasses(times, prompts, schedule)
    now_s, begun, parts = 0.0, 0, list[Part]()
    while begun < (1 + SETTLING) * len(passes.prompts):
        while more := passes.turn(inf):
            begun += more
        passes.submit(now_s)
        parts.append(passes.take_back())
        now_s = parts[-1].back_s
    kept = parts[int(SETTLING * len(parts)) :]
    back_s, sizes = np.array([(part.back_s, part.requests) for part in kept]).T
    rate = float(sizes[1:].sum() / (back_s[-1] - back_s[0]))
    return BusyPrefills(rate, _dispersion(back_s, sizes), PartTimes.of(parts))


def _dispersion(back_s: FloatArray, sizes: FloatArray) -> float:
    """The variance of how many requests come over their mean: of micro-batches as far apart."""
    apart_s = np.diff(back_s)
    return float(sizes.mean() * np.var(apart_s) / np.mean(apart_s) ** 2)
