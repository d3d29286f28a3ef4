"""A model with a task and its bounds; the rivals, and our schedules on the best layout."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from benchmarks.reproduction.latency_bounds.models import Layout, Model, Pipeline, Work
from benchmarks.reproduction.latency_bounds.schedulers import (
    ORCA,
    VLLM,
    BatchTimeline,
    FixedBatch,
    IterationLevel,
    batch_timeline,
    iteration_timeline,
    mean_held_tokens,
    sizes_up_to,
)
from planner.latency_bound.branch_and_bound import (
    ControlPoint,
    Evaluations,
    PerformanceOf,
    best_within,
)
from planner.latency_bound.simulate import ObservedRequests, RequestWatch
from planner.latency_bound.timeline import Performance, Timeline
from planner.lengths import LengthDistribution, RequestLengths
from planner.scheduling import RequestSchedule
from planner.workload import HOLES

QUANTILE = 0.99
"""Of outputs, whose latency is bounded (SLA b of section 7.6)."""
BATCH_STEP = 4
"""Batch sizes of FasterTransformer are its multiples (section 7.1)."""
LATENCY_SHARES = (0.1, 0.3, 0.7)
"""Quantiles of FasterTransformer's latencies over its batch sizes that are bounds."""
PREFILL_SPLITS = (1, 2, 4, 8)
"""Prefill micro-batches for each stage that DeepSpeed may have."""


@dataclass(frozen=True)
class Chosen:
    """A schedule in words, with its requests a second and the latency that is bounded."""

    label: str
    requests_per_s: float
    latency_s: float


class Scheduler(Protocol):
    """A way to schedule requests that finds its best sizes."""

    def best(self, bound_s: float) -> Chosen | None:
        """The most requests a second within the bound; None where nothing keeps it."""


@dataclass(frozen=True, eq=False)
class Setting:
    """A model of the paper with requests of these lengths, on groups of whole nodes; hosts take
    `host_s` beside each pass of a stage.
    """

    model: Model
    lengths: RequestLengths
    host_s: float = 0.0

    @cached_property
    def pipeline(self) -> Pipeline:
        """The most tensor parallelism within a node, and one stage a node: all rivals have it."""
        devices = self.model.costs.cluster.devices
        layout = Layout(self.model.whole_node, len(devices))
        found = Pipeline.of(self.model.costs, devices, layout, self.lengths, self.host_s)
        assert found is not None
        return found

    @cached_property
    def bounded_output(self) -> int:
        """Tokens of the output whose latency is bounded."""
        return self.lengths.outputs.quantile(QUANTILE)

    @cached_property
    def batches(self) -> tuple[BatchTimeline, ...]:
        """FasterTransformer's batches of every size that memory has room for."""
        return tuple(self._fixed(1))

    @cached_property
    def hybrid_batches(self) -> tuple[BatchTimeline, ...]:
        """DeepSpeed's, which may have more prefill micro-batches."""
        return tuple(each for split in PREFILL_SPLITS for each in self._fixed(split))

    def _fixed(self, prefill_split: int) -> Iterator[BatchTimeline]:
        stages = len(self.pipeline.stages)
        requests = BATCH_STEP
        while True:
            decode = min(stages, requests)
            batch = FixedBatch(requests, min(prefill_split * stages, requests), decode)
            if not self._has_room(batch):
                return
            yield batch_timeline(self.pipeline.times, self.lengths, batch)
            requests += BATCH_STEP

    def _has_room(self, batch: FixedBatch) -> bool:
        prompt, output = self.lengths.prompts.longest, self.lengths.outputs.longest
        prefill = math.ceil(batch.requests / batch.prefill_micro_batches)
        decode = math.ceil(batch.requests / batch.decode_micro_batches)
        work = Work(prefill, prompt, decode, output)
        return self.pipeline.token_slots(work) >= batch.requests * (prompt + output)

    @cached_property
    def bounds_s(self) -> tuple[float, ...]:
        """The bounds of section 7.1: quantiles of FasterTransformer's latencies, and none."""
        latencies = [each.latency_of(self.bounded_output) for each in self.batches]
        return (*np.quantile(latencies, LATENCY_SHARES).tolist(), math.inf)

    @cached_property
    def most_in_group(self) -> int:
        """Requests of an iteration-level group for whose tokens memory has room."""
        stages, prompt = len(self.pipeline.stages), self.lengths.prompts.mean
        each, low, high = mean_held_tokens(self.lengths), 0, 2**14
        while low < high:
            middle = (low + high + 1) // 2
            work = Work(1, prompt, middle, self.lengths.outputs.longest)
            room = (1 - HOLES) * self.pipeline.token_slots(work)
            low, high = (middle, high) if middle * stages * each <= room else (low, middle - 1)
        return low


@dataclass(frozen=True, eq=False)
class FixedBatches:
    """Batches of a fixed size, whose output of `bounded_output` tokens is to be within a bound."""

    batches: Sequence[BatchTimeline]
    bounded_output: int

    def best(self, bound_s: float) -> Chosen | None:
        """The size of most requests a second within the bound; None where there is none."""
        kept = [x for x in self.batches if x.latency_of(self.bounded_output) <= bound_s]
        if not kept:
            return None
        best = max(kept, key=lambda each: each.requests_per_s)
        latency_s = best.latency_of(self.bounded_output)
        return Chosen(best.batch.label, best.requests_per_s, latency_s)


@dataclass(frozen=True, eq=False)
class IterationLevelSizes:
    """An iteration-level policy with groups of every size; each is simulated once."""

    setting: Setting
    policy: str
    host_s: float = 0.0
    _known: dict[int, Chosen] = field(default_factory=dict)

    def best(self, bound_s: float) -> Chosen | None:
        """The most requests in a group within the bound: more of them never serve fewer."""
        sizes = list(sizes_up_to(self.setting.most_in_group))
        within = bisect_right(sizes, bound_s, key=lambda size: self.of(size).latency_s)
        return self.of(sizes[within - 1]) if within else None

    def of(self, requests: int) -> Chosen:
        """What a group of so many requests does."""
        if requests not in self._known:
            setting, policy = self.setting, IterationLevel(self.policy, requests, self.host_s)
            found = iteration_timeline(setting.pipeline.times, setting.lengths, policy)
            latency_s = found.latency_of(setting.bounded_output)
            self._known[requests] = Chosen(str(requests), found.requests_per_s, latency_s)
        return self._known[requests]


def rivals_of(setting: Setting) -> dict[str, Scheduler]:
    """All rivals by name. Batches that nobody leaves early are bounded at the longest output, as
    section 7.1 has it.
    """
    longest = setting.lengths.outputs.longest
    return {
        "FT": FixedBatches(setting.batches, longest),
        "DSI": FixedBatches(setting.hybrid_batches, longest),
        "ORCA": IterationLevelSizes(setting, ORCA),
        "vLLM": IterationLevelSizes(setting, VLLM),
    }


LONGEST_S = 1e9
"""A bound that stands for none: schedules without room have an infinite latency."""


class Schedules(Protocol):
    """Schedules on one layout; `known` are those whose performance was asked for."""

    @property
    def known(self) -> dict[ControlPoint, Performance]:
        """The performance of points that were evaluated."""

    @property
    def ranges(self) -> Sequence[range]:
        """The box of the controls."""

    def performance(self, point: ControlPoint) -> Performance:
        """The performance of a point; latency is infinite where requests have no room."""

    def label(self, point: ControlPoint) -> str:
        """The controls of a point in words."""

    def schedule_at(self, point: ControlPoint) -> RequestSchedule:
        """The schedule of a point."""

    def observed(
        self, schedule: RequestSchedule, watch: RequestWatch, seed: int
    ) -> ObservedRequests:
        """What is seen in a simulation of a schedule's events."""

    def timeline(self, schedule: RequestSchedule, lengths: RequestLengths) -> Timeline:
        """The timeline of a schedule for requests of these lengths, whatever it was made for."""


@dataclass(frozen=True, eq=False)
class Placed:
    """The point that was found on a layout."""

    schedules: Schedules
    point: ControlPoint
    performance: Performance


@dataclass(frozen=True, eq=False)
class Bounded:
    """The schedules of all layouts. Every point is evaluated once, whatever the bounds."""

    layouts: Sequence[Schedules]

    def best(self, bound_s: float) -> Chosen | None:
        """The most requests a second within the bound, over all layouts."""
        found = self.placed(bound_s)
        if found is None:
            return None
        performance = found.performance
        label = found.schedules.label(found.point)
        return Chosen(label, performance.requests_per_s, performance.latency_s)

    def placed(self, bound_s: float) -> Placed | None:
        """The point with the most requests a second within the bound, and its layout."""
        best: Placed | None = None
        for schedules in self.layouts:
            least = 0.0 if best is None else best.performance.requests_per_s
            limit_s = min(bound_s, LONGEST_S)
            evaluated = Evaluations(remembered(schedules), limit_s, least)
            found = best_within(schedules.ranges, evaluated)
            if found is not None:
                best = Placed(schedules, found, evaluated(found))
        return best

    @property
    def evaluations(self) -> int:
        """Points that were evaluated."""
        return sum(len(schedules.known) for schedules in self.layouts)


def bounded_performance(
    timeline: Timeline, setting: Setting, quantile: float | None, fits: bool
) -> Performance:
    """The performance by a timeline: its latency is that at the quantile of all requests, or
    without one that of the bounded output; infinite where requests have no room.
    """
    latency_s = timeline.performance.latency_s
    if quantile is None:
        latency_s = timeline.latency_of(setting.bounded_output)
    return Performance(timeline.performance.requests_per_s, latency_s if fits else math.inf)


def remembered(schedules: Schedules) -> PerformanceOf:
    """The performance of points, each of which is computed once."""

    def performance(point: ControlPoint) -> Performance:
        if point not in schedules.known:
            schedules.known[point] = schedules.performance(point)
        return schedules.known[point]

    return performance


def waa_decode_requests(outputs: LengthDistribution, prefill_requests: float) -> float:
    """B_D = B_E * S_D of WAA: a request decodes for as many rounds as it makes decode steps."""
    return prefill_requests * (outputs.mean - 1)
