"""Placements and schedules in turns: layers where a schedule runs best, then the best schedule
there.

For a given schedule the best placement is the one whose cycle is shortest, which is best for both
throughput and latency: an assignment problem. For a given placement branch and bound finds the
schedule. Each turn improves on the one before or is the last. Where it ends depends on where it
begins: with many requests in flight there is no room for more bits, with which there would be
better schedules of fewer. So there are several beginnings, each bitwidth alone among them, and from
the best schedule on, fewer and more requests in flight are tried too.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.latency_bound.branch_and_bound import Evaluations, Point, Tolerance, best_evaluated
from planner.latency_bound.performance import Performance
from planner.latency_bound.placing.placement import Placement
from planner.latency_bound.timeline import Timeline
from planner.scheduling import RequestSchedule, ScheduleKind
from planner.search.candidate_search import SearchTime
from quant.common.errors import InfeasibleError

PROGRESS = 1e-3
"""Share by which a turn must improve for another one."""

MOST_TURNS = 6

NEAR = (0.5, 0.8, 1.25)
"""Requests in flight, relative to the best schedule's, for which layers are placed again."""


@dataclass(frozen=True)
class Start:
    """A schedule to place layers for; `free`: its groups may be others, as many as stages. With
    `only_bits` all layers have that bitwidth.
    """

    schedule: RequestSchedule
    free: bool = True
    only_bits: int | None = None


class Placed(Protocol):
    """Layers on devices, and the performance of every point of the controls there."""

    @property
    def kind(self) -> ScheduleKind:
        """The kind of the schedules."""

    @property
    def key(self) -> Hashable:
        """A key that is equal for equal placements."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement; or that of the stages that decode, then that of those that prefill."""

    @property
    def omega(self) -> float:
        """Summed sensitivity of the layers' bitwidths."""

    @property
    def ranges(self) -> Sequence[range]:
        """The box of the controls."""

    def __call__(self, point: Point) -> Performance:
        """The performance of a point; latency is infinite where requests have no room."""

    def schedule(self, point: Point) -> RequestSchedule:
        """The schedule of a point."""

    def timeline(self, schedule: RequestSchedule) -> Timeline:
        """The timeline of a schedule."""


class Planner(Protocol):
    """Finds placements for schedules of one kind."""

    def starts(self) -> Iterator[Start]:
        """Yield what to begin with, the schedule with the least latency among it."""

    def scaled(self, schedule: RequestSchedule, ratio: float) -> RequestSchedule:
        """The schedule with so many times the requests in flight."""

    def placed(self, start: Start, theta: float, limit_s: float) -> Placed:
        """The best placement for a schedule; InfeasibleError where none fits."""


@dataclass(frozen=True, eq=False)
class Scheduled:
    """A schedule where its layers lie; `seconds` are those of the whole job in its steady state."""

    placed: Placed
    schedule: RequestSchedule
    timeline: Timeline
    seconds: float

    def cost_s(self, theta: float) -> float:
        """Seconds of the job, a unit of sensitivity counting as `theta`."""
        return self.seconds + theta * self.placed.omega


class Alternation:
    """Searches the schedules of one kind, at one theta and bound after another; `prompts` are
    those of the job. Placements that were found stay known, with all that was evaluated there.
    """

    def __init__(
        self, planner: Planner, prompts: int, search_time: SearchTime, tolerance: Tolerance
    ) -> None:
        self._planner, self._prompts = planner, prompts
        self._search_time, self._tolerance = search_time, tolerance
        self._pool: dict[Hashable, Placed] = {}
        self._known: dict[Hashable, dict[Point, Performance]] = {}

    @property
    def evaluations(self) -> int:
        """Points that were evaluated, over all placements."""
        return sum(map(len, self._known.values()))

    @property
    def least(self) -> Scheduled | None:
        """The schedule with the least latency on any placement; None where nothing fits."""
        ends = (self._lowest(placed) for placed in self._pool.values())
        fitting = (each for each in ends if each is not None)
        return min(fitting, key=lambda each: each.timeline.performance.latency_s, default=None)

    def best(self, theta: float, bound_s: float) -> Scheduled | None:
        """The best schedule found within the bound at this theta; None where none keeps it."""
        if not self._pool:
            for start in self._planner.starts():
                self._place(start, theta)
        best: Scheduled | None = None
        for placed in list(self._pool.values()):
            best = self._better(placed, theta, bound_s, best) or best
        if best is None:
            return None
        best = self._descend(best.schedule, theta, bound_s, best)
        for ratio in NEAR:
            other = self._planner.scaled(best.schedule, ratio)
            best = self._descend(other, theta, bound_s, best)
        return best

    def _place(self, start: Start, theta: float) -> Placed | None:
        """The best placement for a schedule, which is known from then on; None where none fits."""
        try:
            placed = self._planner.placed(start, theta, self._search_time.next_s())
        except InfeasibleError:
            return None
        return self._pool.setdefault(placed.key, placed)

    def _descend(
        self, schedule: RequestSchedule, theta: float, bound_s: float, best: Scheduled
    ) -> Scheduled:
        """Improve in turns from `schedule` on; the best there is then."""
        for _ in range(MOST_TURNS):
            placed = self._place(Start(schedule, free=False), theta)
            found = None if placed is None else self._better(placed, theta, bound_s, best)
            if found is None:
                return best
            before_s, best, schedule = best.cost_s(theta), found, found.schedule
            if found.cost_s(theta) > before_s * (1 - PROGRESS):
                return best
        return best

    def _better(
        self, placed: Placed, theta: float, bound_s: float, best: Scheduled | None
    ) -> Scheduled | None:
        """The best schedule on a placement, if it is better than the best so far."""
        more_than = 0.0
        if best is not None:
            left_s = best.cost_s(theta) - theta * placed.omega
            if left_s <= 0:
                return None
            more_than = self._prompts / left_s
        known = self._known.setdefault(placed.key, {})

        def performance(point: Point) -> Performance:
            if point not in known:
                known[point] = placed(point)
            return known[point]

        evaluated = Evaluations(performance, bound_s, more_than)
        found = best_evaluated(placed.ranges, evaluated, bound_s, self._tolerance)
        return None if found is None else self._scheduled(placed, found.point)

    def _scheduled(self, placed: Placed, point: Point) -> Scheduled:
        schedule = placed.schedule(point)
        timeline = placed.timeline(schedule)
        seconds = self._prompts / timeline.performance.requests_per_s
        return Scheduled(placed, schedule, timeline, seconds)

    def _lowest(self, placed: Placed) -> Scheduled | None:
        """The schedule of least latency on a placement; None where not even that has room."""
        low = tuple(each[0] for each in placed.ranges)
        known = self._known.setdefault(placed.key, {})
        if low not in known:
            known[low] = placed(low)
        return self._scheduled(placed, low) if known[low].latency_s < math.inf else None
