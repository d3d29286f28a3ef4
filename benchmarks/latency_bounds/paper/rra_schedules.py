"""Our RRA on equal GPUs: newcomers and decode steps by branch and bound, on every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from benchmarks.latency_bounds.paper.bounded import Bounded
from benchmarks.latency_bounds.paper.layouts import layouts_of
from benchmarks.latency_bounds.paper.pipelines import Layout, Pipeline, Work
from benchmarks.latency_bounds.paper.setting import QUANTILE, Setting
from planner.latency_bound.branch_and_bound import Point
from planner.latency_bound.completions import Completions
from planner.latency_bound.controls import rra_schedule, shortest_turns
from planner.latency_bound.performance import Performance
from planner.latency_bound.rra import rra_timeline
from planner.length_distribution import RequestLengths
from planner.scheduling import SCHEDULE_TOLERANCE, RequestSchedule
from planner.workload import HOLES

MOST_NEWCOMERS = 2**12


@dataclass(frozen=True, eq=False)
class RraSchedules:
    """Schedules of RRA on one layout.

    Points are (newcomers B_E, 1 + longest decode steps - N_D): each raises throughput and latency.
    There is a group of requests for each stage, as far as there are newcomers for all of them.
    """

    setting: Setting
    layout: Layout
    pipeline: Pipeline
    known: dict[Point, Performance] = field(default_factory=dict)

    @property
    def ranges(self) -> tuple[range, range]:
        """The box of points."""
        return range(1, self._most_newcomers() + 1), range(1, self.longest_steps + 1)

    @property
    def longest_steps(self) -> int:
        """Decode steps of the longest output."""
        return max(1, self.setting.lengths.outputs.longest - 1)

    def label(self, point: Point) -> str:
        """The controls of a point as in table 6."""
        schedule = self.schedule(point)
        parts = f"B_E={schedule.prefill_requests}, N_D={schedule.decode_steps}"
        return f"{parts}{self.layout.label}"

    def performance(self, point: Point) -> Performance:
        """The performance of a point; latency is infinite where requests have no room."""
        schedule, fits = self._fitting(point)
        timeline = rra_timeline(self.pipeline.times, self.setting.lengths, schedule, QUANTILE)
        latency_s = timeline.latency_of(self.setting.bounded_output) if fits else math.inf
        return Performance(timeline.performance.requests_per_s, latency_s)

    def schedule(self, point: Point) -> RequestSchedule:
        """The schedule of a point."""
        return self._fitting(point)[0]

    def _fitting(self, point: Point) -> tuple[RequestSchedule, bool]:
        """The schedule with the best prefill micro-batch that has room, and whether any has."""
        newcomers, frequency = point
        lengths, steps = self.setting.lengths, self.longest_steps + 1 - frequency
        groups = min(len(self.pipeline.stages), newcomers)
        each = math.ceil(newcomers / groups)
        sizes = shortest_turns(self.pipeline.times, lengths.prompts, each, groups)
        schedule = rra_schedule(lengths, newcomers, steps, groups, sizes[0])
        for size in sizes:
            chosen = replace(schedule, prefill_micro_batch=size)
            if rra_has_room(self.pipeline, lengths, chosen):
                return chosen, True
        return schedule, False

    def _most_newcomers(self) -> int:
        """Newcomers that have room where a turn comes only after the longest output."""
        lengths = self.setting.lengths
        phases = Completions(lengths.outputs, self.longest_steps).phases
        slots = self.pipeline.token_slots(Work(1, 1.0, 1, 1))
        most = int(slots / reserved_tokens(lengths, phases))
        return min(MOST_NEWCOMERS, max(1, most))


def rra_of(setting: Setting) -> Bounded:
    """RRA on every layout of the model's GPUs."""
    return Bounded(tuple(_rra_schedules(setting)))


def _rra_schedules(setting: Setting) -> Iterator[RraSchedules]:
    model = setting.model
    for layout in layouts_of(model, model.count):
        devices = model.costs.cluster.devices
        pipeline = Pipeline.of(model.costs, devices, layout, setting.lengths)
        if pipeline is not None:
            yield RraSchedules(setting, layout, pipeline)


def reserved_tokens(lengths: RequestLengths, requests: float) -> float:
    """Token slots for so many requests in flight: each reserves its prompt and the longest output,
    and groups may be larger than planned by their tolerance (as in `llmpq plan`).
    """
    each = lengths.prompts.mean + lengths.outputs.longest
    return (1 + SCHEDULE_TOLERANCE) * requests * each / (1 - HOLES)


def rra_has_room(pipeline: Pipeline, lengths: RequestLengths, schedule: RequestSchedule) -> bool:
    """Whether memory has room for the requests in flight of a schedule."""
    most = (1 + SCHEDULE_TOLERANCE) * schedule.decode_requests
    group = math.ceil(most / schedule.decode_micro_batches)
    size, longest = schedule.prefill_micro_batch, lengths.outputs.longest
    work = Work(size, lengths.prompts.mean, group, longest)
    return pipeline.token_slots(work) >= reserved_tokens(lengths, schedule.decode_requests)
