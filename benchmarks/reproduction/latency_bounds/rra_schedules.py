"""Our RRA on equal GPUs: newcomers and decode steps by branch and bound, on every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from benchmarks.reproduction.latency_bounds.bounded import Bounded, bounded_performance
from benchmarks.reproduction.latency_bounds.layouts import layouts_of
from benchmarks.reproduction.latency_bounds.pipelines import Layout, Pipeline, Work
from benchmarks.reproduction.latency_bounds.setting import QUANTILE, Setting
from planner.latency_bound.branch_and_bound import ControlPoint
from planner.latency_bound.estimates import shortest_turns
from planner.latency_bound.rra_timeline import rra_timeline
from planner.latency_bound.schedules import Completions, rra_schedule
from planner.latency_bound.simulate import ObservedRequests, Watch, simulate_rra
from planner.latency_bound.timeline import Performance, Timeline
from planner.length_distribution import RequestLengths
from planner.scheduling import SCHEDULE_TOLERANCE, RequestSchedule
from planner.workload import HOLES

EVERY_UP_TO, GROWTH = 24, 1.04
"""Newcomers and decode steps up to here are all tried; from there on each is larger by this."""


@dataclass(frozen=True, eq=False)
class RraSchedules:
    """Schedules of RRA on one layout.

    A point is the place of newcomers (B_E) in `newcomers`, which ascend, and that of decode steps
    (N_D) in `steps`, which descend: so both raise throughput and latency. There is a group of
    requests for each stage, as far as there are newcomers for all of them. Of latency `quantile` is
    that over all requests, or without one the output is bounded of which `setting` says so.
    """

    setting: Setting
    layout: Layout
    pipeline: Pipeline
    quantile: float | None = None
    known: dict[ControlPoint, Performance] = field(default_factory=dict)
    _prefills: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @property
    def ranges(self) -> tuple[range, range]:
        """The box of points."""
        return range(len(self.newcomers)), range(len(self.steps))

    @cached_property
    def newcomers(self) -> tuple[int, ...]:
        """Newcomers that are tried, up to those that have room where a turn comes only after the
        longest output.
        """
        lengths = self.setting.lengths
        phases = Completions(lengths.outputs, lengths.outputs.longest).phases
        slots = self.pipeline.token_slots(Work(1, 1.0, 1, 1))
        most = int(slots / reserved_tokens(lengths, phases))
        return tuple(numbers_up_to(max(1, most)))

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Decode steps that are tried: among others all by which the bounded output ends with the
        last step of a phase, where latency is least.
        """
        bounded = max(1, self.setting.bounded_output - 1)
        longest = max(1, self.setting.lengths.outputs.longest - 1)
        even = {math.ceil(bounded / phases) for phases in range(1, bounded + 1)}
        return tuple(sorted({*numbers_up_to(longest), *even}, reverse=True))

    def label(self, point: ControlPoint) -> str:
        """The controls of a point as in table 6."""
        return f"B_E={self.newcomers[point[0]]}, N_D={self.steps[point[1]]}{self.layout.label}"

    def performance(self, point: ControlPoint) -> Performance:
        """The performance of a point; latency is infinite where requests have no room."""
        return self.performance_of(self.newcomers[point[0]], self.steps[point[1]])

    def performance_of(self, newcomers: int, steps: int) -> Performance:
        """The performance of these controls."""
        schedule, fits = self.schedule(newcomers, steps)
        timeline = self.timeline(schedule, self.setting.lengths)
        return bounded_performance(timeline, self.setting, self.quantile, fits)

    def timeline(self, schedule: RequestSchedule, lengths: RequestLengths) -> Timeline:
        """The timeline of a schedule for requests of these lengths."""
        return rra_timeline(self.pipeline.grid_times, lengths, schedule, self.quantile or QUANTILE)

    def observed(self, schedule: RequestSchedule, watch: Watch, seed: int) -> ObservedRequests:
        """What is seen in a simulation of a schedule's events, at the times before the grid."""
        generator = np.random.default_rng(seed)
        return simulate_rra(self.pipeline.times, self.setting.lengths, schedule, watch, generator)

    def schedule_at(self, point: ControlPoint) -> RequestSchedule:
        """The schedule of a point."""
        return self.schedule(self.newcomers[point[0]], self.steps[point[1]])[0]

    def schedule(self, newcomers: int, steps: int) -> tuple[RequestSchedule, bool]:
        """The schedule with the best prefill micro-batch that has room, and whether any has."""
        lengths, groups = self.setting.lengths, min(len(self.pipeline.stages), newcomers)
        sizes = self._sizes(math.ceil(newcomers / groups), groups)
        schedule = rra_schedule(lengths, newcomers, steps, groups, sizes[0])
        for size in sizes:
            chosen = replace(schedule, prefill_micro_batch=size)
            if rra_has_room(self.pipeline, lengths, chosen):
                return chosen, True
        return schedule, False

    def _sizes(self, newcomers: int, groups: int) -> tuple[int, ...]:
        """Prefill micro-batches for so many newcomers of a group, the best one first."""
        if (newcomers, groups) not in self._prefills:
            prompts = self.setting.lengths.prompts
            found = shortest_turns(self.pipeline.grid_times, prompts, newcomers, groups)
            self._prefills[newcomers, groups] = found
        return self._prefills[newcomers, groups]


def rra_of(setting: Setting, quantile: float | None = None) -> Bounded:
    """RRA on every layout of the model's GPUs."""
    return Bounded(tuple(_rra_schedules(setting, quantile)))


def _rra_schedules(setting: Setting, quantile: float | None) -> Iterator[RraSchedules]:
    model = setting.model
    for layout in layouts_of(model, model.count):
        devices = model.costs.cluster.devices
        pipeline = Pipeline.of(model.costs, devices, layout, setting.lengths)
        if pipeline is not None:
            yield RraSchedules(setting, layout, pipeline, quantile)


def numbers_up_to(most: int) -> Iterator[int]:
    """Yield ascending whole numbers to try, from 1 to `most`."""
    number = 1
    while number < most:
        yield number
        number = max(number + 1, round(GROWTH * number) if number >= EVERY_UP_TO else 0)
    yield most


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
