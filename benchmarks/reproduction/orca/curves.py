"""Latency by load of one policy, and the load at which it is twice the least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from actors.schedule.orca import OrcaScheduler, orca_sizes
from actors.schedule.scheduler import Scheduler
from benchmarks.reproduction.orca.pipelines import MOST_BATCH, ModelledPipeline
from benchmarks.reproduction.orca.request_level import RequestLevelScheduler
from benchmarks.reproduction.orca.traces import Lengths, poisson
from benchmarks.reproduction.orca.virtual_time import outcomes
from planner.scheduling import PolicyOptions

ALONE_PER_S = 1e-3
"""A load at which no request ever meets another one."""
BISECTIONS = 4
"""Of a factor of 1.5: to within 2.6 %."""
BETTER = 1.03
LEAST_BATCH = 8
"""The least max_bs of orca that is tried: the paper's best ones are larger."""
SIZES = (1, 2, 4, 8, 16, 32, 64, MOST_BATCH)


@dataclass(frozen=True)
class Policy:
    """A policy with its knobs: `sizes` are orca's (max_bs,) or the baseline's (max_bs, mbs)."""

    name: str
    sizes: tuple[int, ...]
    scheduler: Callable[[], Scheduler]

    @property
    def label(self) -> str:
        """The paper's label in fig. 10."""
        return f"{self.name}({', '.join(map(str, self.sizes))})"


def orca_policies(pipeline: ModelledPipeline) -> list[Policy]:
    """The product's own scheduler with every max_bs."""

    def make(max_bs: int) -> Scheduler:
        options = PolicyOptions("orca", max_batch_size=max_bs)
        return OrcaScheduler(orca_sizes(pipeline.plan, options), len(pipeline.times))

    return [Policy("orca", (size,), partial(make, size)) for size in SIZES if size >= LEAST_BATCH]


def request_level_policies(pipeline: ModelledPipeline) -> list[Policy]:
    """Every max_bs that memory has room for, with two mbs: that of the whole batch, and that of as
    many micro-batches as there are stages.
    """
    slot_tokens = pipeline.plan.workload.total_length

    def make(max_bs: int, mbs: int) -> Scheduler:
        return RequestLevelScheduler(max_bs, mbs, slot_tokens, pipeline.kv_tokens)

    return [
        Policy("ft", (max_bs, mbs), partial(make, max_bs, mbs))
        for max_bs in SIZES
        if max_bs * slot_tokens <= pipeline.kv_tokens
        for mbs in sorted({max_bs, -(-max_bs // len(pipeline.times))}, reverse=True)
    ]


@dataclass(frozen=True)
class Point:
    """What a load leads to: median normalized latency, and requests and tokens served a second."""

    per_s: float
    normalized_s: float
    served_per_s: float
    tokens_per_s: float


@dataclass(frozen=True, eq=False)
class Curve:
    """Latency by load of `policy` on requests of these lengths; every point is computed once."""

    pipeline: ModelledPipeline
    policy: Policy
    lengths: Sequence[Lengths]
    seed: int = 0
    _points: dict[float, Point] = field(default_factory=dict)

    def at(self, per_s: float) -> Point:
        """The point of this load."""
        if per_s not in self._points:
            trace = poisson(self.lengths, per_s, self.seed)
            found = outcomes(self.policy.scheduler(), self.pipeline.times, trace)
            seconds = max(each.ended_s for each in found) - trace[0].at_s
            self._points[per_s] = Point(
                per_s,
                median(each.normalized_s for each in found),
                len(found) / seconds,
                sum(each.lengths.new for each in found) / seconds,
            )
        return self._points[per_s]

    @property
    def peak(self) -> Point:
        """All requests at once: the most that is served a second."""
        return self.at(1e6)

    def carries(self, per_s: float, normalized_s: float) -> bool:
        """Whether latency at this load is at most this."""
        return self.at(per_s).normalized_s <= normalized_s

    def load_at(self, normalized_s: float) -> float:
        """The load at which latency goes beyond this, by bisection.

        It is at most what is served when all requests come at once: where the trace is too short
        for a queue, latency would stay low beyond that.
        """
        most = self.peak.served_per_s
        low = high = most / 2
        while high < most and self.carries(high, normalized_s):
            low, high = high, min(high * 1.5, most)
        if high == most and self.carries(most, normalized_s):
            return most
        while not self.carries(low, normalized_s):
            low, high = low / 1.5, low
        for _ in range(BISECTIONS):
            middle = (low * high) ** 0.5
            carried = self.carries(middle, normalized_s)
            low, high = (middle, high) if carried else (low, middle)
        return low


def best_curve(curves: Sequence[Curve], normalized_s: float) -> Curve:
    """The one that carries the most load at this latency; one that does not carry `BETTER` times
    the load of the best so far is not looked at further.
    """
    chosen, load = curves[0], 0.0
    for curve in curves:
        if not load or curve.carries(BETTER * load, normalized_s):
            found = curve.load_at(normalized_s)
            if found > load:
                chosen, load = curve, found
    return chosen
