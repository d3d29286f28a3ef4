"""Our schedules on several layouts, the best of which is found by branch and bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.reproduction.latency_bounds.setting import Chosen, Setting
from planner.latency_bound.branch_and_bound import (
    ControlPoint,
    Evaluations,
    PerformanceOf,
    best_evaluated,
)
from planner.latency_bound.simulate import ObservedRequests, Watch
from planner.latency_bound.timeline import Performance, Timeline
from planner.length_distribution import RequestLengths
from planner.scheduling import RequestSchedule

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

    def observed(self, schedule: RequestSchedule, watch: Watch, seed: int) -> ObservedRequests:
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
            found = best_evaluated(schedules.ranges, evaluated, limit_s)
            if found is not None:
                best = Placed(schedules, found.point, found.performance)
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
