"""The search for the best schedule of one kind: by estimates, then by timelines near the best.

The estimates' latencies are off by some factor, which is measured where the search ends; then it
goes on with the bound that much wider or tighter.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from planner.latency_bound.branch_and_bound import (
    Evaluations,
    Point,
    Tolerance,
    best_evaluated,
)
from planner.latency_bound.performance import Performance
from planner.latency_bound.placing.alternation import Alternation, Candidate
from planner.latency_bound.placing.placed import Placed, Planner
from planner.latency_bound.timeline import Timeline
from planner.scheduling import RequestSchedule
from planner.search.candidate_search import SearchTime

MOST_CALIBRATIONS, CALIBRATED = 3, 0.02
"""How often the factor is measured at most, and the share by which it may still change."""


@dataclass(frozen=True, eq=False)
class Scheduled:
    """A schedule where its layers lie; `seconds` are those of the whole job in its steady state."""

    placed: Placed
    schedule: RequestSchedule
    timeline: Timeline
    seconds: float

    @property
    def latency_s(self) -> float:
        """The latency that is bounded."""
        return self.timeline.performance.latency_s

    def cost_s(self, theta: float) -> float:
        """Seconds of the job, a unit of sensitivity counting as `theta`."""
        return self.seconds + theta * self.placed.omega


class KindSearch:
    """Searches the schedules of one kind, at one theta and bound after another; `prompts` are those
    of the job.
    """

    def __init__(
        self, planner: Planner, prompts: int, search_time: SearchTime, tolerance: Tolerance
    ) -> None:
        self._alternation = Alternation(planner, prompts, search_time, tolerance)
        self._prompts, self._tolerance = prompts, tolerance
        self._factor = 1.0
        self._known: dict[Hashable, dict[Point, Performance]] = {}

    @property
    def evaluations(self) -> int:
        """Points that were evaluated, by estimates and by timelines."""
        return self._alternation.evaluations + sum(map(len, self._known.values()))

    @property
    def least(self) -> Scheduled | None:
        """The schedule with the least latency that was found; None where nothing fits."""
        least = self._alternation.least
        return None if least is None else self._scheduled(least.placed, least.point)

    def best(self, theta: float, bound_s: float) -> Scheduled | None:
        """The best schedule found within the bound at this theta; None where none keeps it."""
        found = self._calibrated(theta, bound_s)
        if found is not None:
            return self._refined(found, bound_s)
        least = self.least
        return least if least is not None and least.latency_s <= bound_s else None

    def _calibrated(self, theta: float, bound_s: float) -> Candidate | None:
        """The best by estimates, as far as these are right."""
        found = self._alternation.best(theta, bound_s * self._factor)
        for _ in range(MOST_CALIBRATIONS):
            if found is None or math.isinf(bound_s):
                break
            exact = self._exact(found.placed, found.point)
            factor = found.performance.latency_s / exact.latency_s
            if abs(factor / self._factor - 1) < CALIBRATED:
                break
            self._factor = factor
            found = self._alternation.best(theta, bound_s * factor) or found
        return found

    def _refined(self, found: Candidate, bound_s: float) -> Scheduled | None:
        """The best schedule near one, by timelines; or anywhere on its placement."""
        placed = found.placed
        evaluated = Evaluations(lambda point: self._exact(placed, point), bound_s)
        for ranges in (placed.around(found.point), placed.ranges):
            best = best_evaluated(ranges, evaluated, bound_s, self._tolerance)
            if best is not None:
                return self._scheduled(placed, best.point)
        return None

    def _exact(self, placed: Placed, point: Point) -> Performance:
        """The performance of a point by its timeline, which is made once."""
        known = self._known.setdefault(placed.key, {})
        if point not in known:
            known[point] = placed.exact(point)
        return known[point]

    def _scheduled(self, placed: Placed, point: Point) -> Scheduled:
        schedule = placed.schedule(point)
        timeline = placed.timeline(schedule)
        seconds = self._prompts / timeline.performance.requests_per_s
        return Scheduled(placed, schedule, timeline, seconds)
