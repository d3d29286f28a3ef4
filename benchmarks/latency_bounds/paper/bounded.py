"""Our schedules on several layouts, the best of which is found by branch and bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.latency_bounds.paper.setting import Chosen
from planner.latency_bound.branch_and_bound import (
    Evaluations,
    PerformanceOf,
    Point,
    Tolerance,
    best_evaluated,
)
from planner.latency_bound.performance import Performance

LONGEST_S = 1e9
"""A bound that stands for none: schedules without room have an infinite latency."""


class Schedules(Protocol):
    """Schedules on one layout; `known` are those whose performance was asked for."""

    @property
    def known(self) -> dict[Point, Performance]:
        """The performance of points that were evaluated."""

    @property
    def ranges(self) -> Sequence[range]:
        """The box of the controls."""

    def performance(self, point: Point) -> Performance:
        """The performance of a point; latency is infinite where requests have no room."""

    def label(self, point: Point) -> str:
        """The controls of a point in words."""


@dataclass(frozen=True, eq=False)
class Bounded:
    """The schedules of all layouts. Every point is evaluated once, whatever the bounds."""

    layouts: Sequence[Schedules]
    tolerance: Tolerance = Tolerance()  # noqa: RUF009  (frozen)

    def best(self, bound_s: float) -> Chosen | None:
        """The most requests a second within the bound, over all layouts."""
        best: Chosen | None = None
        for schedules in self.layouts:
            best = self._better(schedules, min(bound_s, LONGEST_S), best) or best
        return best

    @property
    def evaluations(self) -> int:
        """Points that were evaluated."""
        return sum(len(schedules.known) for schedules in self.layouts)

    def _better(self, schedules: Schedules, bound_s: float, best: Chosen | None) -> Chosen | None:
        """The best schedule on a layout that serves more than the best so far."""
        least = 0.0 if best is None else best.requests_per_s
        evaluated = Evaluations(remembered(schedules), bound_s, least)
        found = best_evaluated(schedules.ranges, evaluated, bound_s, self.tolerance)
        if found is None:
            return None
        label, performance = schedules.label(found.point), found.performance
        return Chosen(label, performance.requests_per_s, performance.latency_s)


def remembered(schedules: Schedules) -> PerformanceOf:
    """The performance of points, each of which is computed once."""

    def performance(point: Point) -> Performance:
        if point not in schedules.known:
            schedules.known[point] = schedules.performance(point)
        return schedules.known[point]

    return performance
