"""Our RRA on equal GPUs: the controls of ExeGPT section 4.2, searched by branch and bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.latency_bounds.paper.pipelines import Layout, Pipeline, Work
from benchmarks.latency_bounds.paper.setting import Chosen, Setting
from planner.latency_bound.branch_and_bound import Evaluations, Point, best_evaluated
from planner.latency_bound.completions import Completions
from planner.latency_bound.controls import rra_schedule, shortest_turns
from planner.latency_bound.performance import DOES_NOT_FIT, Performance
from planner.latency_bound.rra import rra_timeline
from planner.length_distribution import RequestLengths
from planner.scheduling import SCHEDULE_TOLERANCE, RequestSchedule
from planner.workload import HOLES

DEGREES = (1, 2, 4, 8)
MOST_NEWCOMERS = 2**12
LONGEST_S = 1e9
"""A bound that stands for none: schedules without room have an infinite latency."""


@dataclass(frozen=True, eq=False)
class RraSchedules:
    """Schedules of RRA with tensor-parallel groups of one degree.

    Points are (newcomers B_E, 1 + longest decode steps - N_D, groups of GPUs that are taken apart
    into single ones): each raises throughput and latency. There is a group of requests for each
    stage, as far as there are newcomers for all of them.
    """

    setting: Setting
    degree: int
    known: dict[Point, Performance] = field(default_factory=dict)
    _pipelines: dict[int, Pipeline | None] = field(default_factory=dict)

    @property
    def ranges(self) -> tuple[range, range, range]:
        """The box of points."""
        return range(1, self._most_newcomers() + 1), range(1, self._longest + 1), self.apart

    @property
    def apart(self) -> range:
        """Numbers of groups that may be taken apart."""
        return range(self.setting.model.count // self.degree + 1) if self.degree > 1 else range(1)

    @property
    def _longest(self) -> int:
        """Decode steps of the longest output."""
        return max(1, self.setting.lengths.outputs.longest - 1)

    def best(self, bound_s: float) -> Chosen | None:
        """The most requests a second within the bound."""
        bound_s = min(bound_s, LONGEST_S)
        found = best_evaluated(self.ranges, Evaluations(self, bound_s), bound_s)
        if found is None:
            return None
        performance = found.performance
        return Chosen(self.label(found.point), performance.requests_per_s, performance.latency_s)

    def label(self, point: Point) -> str:
        """The controls of a point as in table 6."""
        schedule, pipeline = self.schedule(point), self.pipeline(point[2])
        assert pipeline is not None
        parts = f"B_E={schedule.prefill_requests}, N_D={schedule.decode_steps}"
        grouped = self.setting.model.count - self.degree * point[2]
        return f"{parts}, T_P={self.degree}x{grouped}" if self.degree > 1 and grouped else parts

    def __call__(self, point: Point) -> Performance:
        """The performance of a point; latency is infinite where requests have no room."""
        if point not in self.known:
            self.known[point] = self._performance(point)
        return self.known[point]

    def _performance(self, point: Point) -> Performance:
        pipeline, lengths = self.pipeline(point[2]), self.setting.lengths
        if pipeline is None:
            return DOES_NOT_FIT
        schedule, fits = self._fitting(point, pipeline)
        timeline = rra_timeline(pipeline.times, lengths, schedule, 0.99)
        latency_s = timeline.latency_of(self.setting.bounded_output) if fits else math.inf
        return Performance(timeline.performance.requests_per_s, latency_s)

    def schedule(self, point: Point) -> RequestSchedule:
        """The schedule of a point whose layout has no more stages than the model has layers."""
        pipeline = self.pipeline(point[2])
        assert pipeline is not None
        return self._fitting(point, pipeline)[0]

    def _fitting(self, point: Point, pipeline: Pipeline) -> tuple[RequestSchedule, bool]:
        """The schedule with the best prefill micro-batch that has room, and whether any has."""
        newcomers, frequency, _ = point
        lengths, steps = self.setting.lengths, self._longest + 1 - frequency
        groups = min(len(pipeline.stages), newcomers)
        each = math.ceil(newcomers / groups)
        sizes = shortest_turns(pipeline.times, lengths.prompts, each, groups)
        schedule = rra_schedule(lengths, newcomers, steps, groups, sizes[0])
        for size in sizes:
            if rra_has_room(pipeline, lengths, replace(schedule, prefill_micro_batch=size)):
                return replace(schedule, prefill_micro_batch=size), True
        return schedule, False

    def pipeline(self, apart: int) -> Pipeline | None:
        """The pipeline with so many groups taken apart; None where it has too many stages."""
        if apart not in self._pipelines:
            model = self.setting.model
            layout = Layout(self.degree, model.count - self.degree * apart)
            if self.degree == 1:
                layout = Layout()
            devices = model.costs.cluster.devices
            self._pipelines[apart] = Pipeline.of(
                model.costs, devices, layout, self.setting.lengths
            )
        return self._pipelines[apart]

    def _most_newcomers(self) -> int:
        """Newcomers that have room where a turn comes only after the longest output."""
        longest = Completions(self.setting.lengths.outputs, self._longest).phases
        slots = max(
            (pipeline.token_slots(Work(1, 1.0, 1, 1)) for pipeline in self._ends()), default=0
        )
        tokens = reserved_tokens(self.setting.lengths, 1.0) * longest
        return min(MOST_NEWCOMERS, max(1, int(slots / tokens)))

    def _ends(self) -> Sequence[Pipeline]:
        """The pipelines with the fewest and the most stages."""
        ends = (self.pipeline(self.apart[0]), self.pipeline(self.apart[-1]))
        return [each for each in ends if each is not None]


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
    work = Work(
        schedule.prefill_micro_batch, lengths.prompts.mean, group, lengths.outputs.longest
    )
    needed = reserved_tokens(lengths, schedule.decode_requests)
    return pipeline.token_slots(work) >= needed
