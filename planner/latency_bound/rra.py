"""Placements for schedules of kind `rra`, whose stages have both phases in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, floor

import numpy as np

from planner.latency_bound.alternation import (
    BEYOND,
    MOST_GROUPS,
    NEAR,
    SETTLING,
    KindPlanner,
    PlacingGoal,
    ScheduleSpace,
    scaled_count,
)
from planner.latency_bound.branch_and_bound import ControlPoint
from planner.latency_bound.placed_layers import KnownRoom, Need, PlacedLayers, most_requests
from planner.latency_bound.rra_timeline import rra_timeline
from planner.latency_bound.schedules import (
    BoundRequest,
    completions,
    cycle_of,
    estimated_rra,
    most_in_group,
    rra_schedule,
    shortest_turns,
)
from planner.latency_bound.simulate import ObservedRequests, RequestWatch, simulate_rra
from planner.latency_bound.timeline import Performance, Timeline, unlimited
from planner.scheduling import SCHEDULE_TOLERANCE, RequestSchedule, ScheduleKind
from planner.workload import Job, MicroBatches

SHARES, FEW, MANY = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 64), 1 / 8, 3 / 4
"""Shares of the requests that memory has room for, with which placements are begun, and
those of placements of one bitwidth, on the best devices and on all."""

FEW_SETS = 3
"""Sets of devices of which the room is looked at before the first search."""


@dataclass(frozen=True, eq=False)
class RraPlanner(KindPlanner):
    _known_most: dict[tuple[int, ...] | None, int] = field(default_factory=dict)

    def starts(self) -> Iterator[PlacingGoal]:
        """Yield what to begin with: from as many requests as have room down to one."""
        for share in SHARES:
            yield PlacingGoal(self._sharing(share))
        longest = max(1, self.request.lengths.outputs.longest - 1)
        yield PlacingGoal(rra_schedule(self.request.lengths, 1, longest, 1, 1))
        for bits in self.costs.bits:
            yield PlacingGoal(self._sharing(FEW, (bits,)), usable_bits=(bits,))
            yield PlacingGoal(self._sharing(MANY, (bits,)), usable_bits=(bits,), on_all=True)

    def placed(self, start: PlacingGoal, theta: float, limit_s: float) -> RraSpace:
        """Layers of the fastest cycle, with `theta` seconds of the job a unit; InfeasibleError."""
        schedule = start.schedule
        costs = replace(
            self.costs,
            theta=theta,
            workload=self.costs.in_flight(self.job, schedule.most_in_flight),
            cycle=cycle_of(schedule, self.job, start.free),
            options=replace(
                self.costs.options,
                search_time_limit=limit_s,
                decode_micro_batch=None if start.free else most_in_group(schedule),
                keep_all_devices=start.on_all or self.costs.options.keep_all_devices,
            ),
        )
        return RraSpace(self._best_layers(costs, start), self.job, self.request)

    def _sharing(self, share: float, usable_bits: tuple[int, ...] | None = None) -> RequestSchedule:
        lengths, stages = self.request.lengths, len(self.costs.cluster.devices)
        steps = max(1, ceil((lengths.outputs.mean - 1) / 2))
        phases = max(1.0, completions(lengths.outputs, steps).phases)
        most = self._most(usable_bits or self.costs.usable_bits)
        newcomers = max(1, int(share * most / (1 + SCHEDULE_TOLERANCE) / phases))
        return rra_schedule(lengths, newcomers, steps, min(stages, newcomers), 1)

    def _most(self, usable_bits: tuple[int, ...] | None) -> int:
        if usable_bits not in self._known_most:
            costs = replace(self.costs, usable_bits=usable_bits)
            most = most_requests(costs, self.job, self.clock, FEW_SETS)
            self._known_most[usable_bits] = max(1, most)
        return self._known_most[usable_bits]


@dataclass(frozen=True, eq=False)
class RraSpace(ScheduleSpace):
    placement: PlacedLayers
    job: Job
    request: BoundRequest
    kind: ScheduleKind = "rra"
    _known_turns: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @property
    def placements(self) -> tuple[PlacedLayers, ...]:
        return (self.placement,)

    def estimate(self, schedule: RequestSchedule) -> Performance:
        request = self.request
        return estimated_rra(self.placement.times, request.lengths, schedule, request.quantile)

    def around(self, point: ControlPoint) -> tuple[range, ...]:
        newcomers, frequency, groups = point
        steps = (self._longest_steps + 1 - frequency) / BEYOND
        most = ceil(newcomers * BEYOND), self._longest_steps + 1 - floor(steps), groups + 1
        return tuple(
            range(each.start, min(each.stop, end + 1))
            for each, end in zip(self.ranges, most, strict=True)
        )

    def has_room(self, schedule: RequestSchedule) -> bool:
        return self._has_room(schedule, schedule.prefill_micro_batch)

    def timeline(self, schedule: RequestSchedule, quantile: float) -> Timeline:
        return rra_timeline(self.placement.times, self.request.lengths, schedule, quantile)

    def observed(
        self, schedule: RequestSchedule, count: int, check_time: Callable[[], None] = unlimited
    ) -> ObservedRequests:
        watch = RequestWatch(SETTLING * schedule.decode_requests, count, check_time)
        generator, n_slots = np.random.default_rng(0), self._reservable_tokens(schedule)
        times, lengths = self.placement.exact_times, self.request.lengths
        return simulate_rra(times, lengths, schedule, watch, generator, n_slots)

    def _reservable_tokens(self, schedule: RequestSchedule) -> int:
        workload = self.placement.costs.in_flight(self.job, schedule.most_in_flight)
        return workload.reservable_tokens

    def start(self, schedule: RequestSchedule) -> PlacingGoal:
        return PlacingGoal(schedule, free=False)

    def near(self, schedule: RequestSchedule) -> Iterator[PlacingGoal]:
        """Yield fewer and more newcomers, and more that come twice as often on all devices."""
        groups, stages = schedule.decode_micro_batches, len(self.placement.devices)
        size, steps = schedule.prefill_micro_batch, schedule.decode_steps
        lengths, own = self.request.lengths, schedule.prefill_requests
        for ratio in NEAR:
            newcomers = scaled_count(own // groups, ratio) * groups
            yield PlacingGoal(rra_schedule(lengths, newcomers, steps, groups, size), free=False)
        for ratio in (1.0, NEAR[-1]):
            newcomers = max(stages, int(ratio * own))
            often = rra_schedule(lengths, newcomers, max(1, steps // 2), stages, size)
            yield PlacingGoal(often, on_all=True)

    def fitted(self, point: ControlPoint) -> tuple[RequestSchedule, bool]:
        newcomers, frequency, groups = point
        sizes, steps = self._turns(newcomers, groups), self._longest_steps + 1 - frequency
        lengths = self.request.lengths
        schedule = rra_schedule(lengths, newcomers * groups, steps, groups, sizes[0])
        if not self._has_room(schedule, min(sizes)):
            return schedule, False
        best = next(size for size in sizes if self._has_room(schedule, size))
        return replace(schedule, prefill_micro_batch=best), True

    def _turns(self, newcomers: int, groups: int) -> tuple[int, ...]:
        key = newcomers, groups
        if key not in self._known_turns:
            times, lengths = self.placement.times, self.request.lengths
            self._known_turns[key] = shortest_turns(times, lengths, *key)
        return self._known_turns[key]

    def _has_room(self, schedule: RequestSchedule, prefill_micro_batch: int) -> bool:
        need = schedule.most_in_flight, prefill_micro_batch, most_in_group(schedule)
        return self._room(need)

    @cached_property
    def _room(self) -> KnownRoom:
        def has_room(need: Need) -> bool:
            workload = self.placement.costs.in_flight(self.job, need[0])
            return self.placement.has_room(workload, MicroBatches(*need[1:]))

        return KnownRoom(has_room)

    @property
    def _longest_steps(self) -> int:
        return max(1, self.request.lengths.outputs.longest - 1)

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """The box of points (newcomers of a group, 1 + longest decode steps - N_D, groups)."""
        lengths, steps, most = self.request.lengths, self._longest_steps, 1
        while most < self.job.prompts and self._has_room(
            rra_schedule(lengths, 2 * most, steps, 1, 1), 1
        ):
            most *= 2
        newcomers, groups = (
            min(2 * most, self.job.prompts),
            MOST_GROUPS * len(self.placement.devices),
        )
        return range(1, newcomers + 1), range(1, steps + 1), range(1, groups + 1)
