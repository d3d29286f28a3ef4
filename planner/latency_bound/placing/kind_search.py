"""The search for the best schedule of one kind: by estimates, then by timelines near the best.

The estimates' latencies are off by some factor, which is measured where the search ends; then it
goes on with the bound that much wider or tighter. What is found is simulated event by event, and
where that does not keep the bound, the search goes on with a tighter one and for more requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import ceil

from planner.latency_bound.branch_and_bound import (
    Evaluations,
    Point,
    Tolerance,
    best_evaluated,
)
from planner.latency_bound.events.watch import Observed
from planner.latency_bound.placing.alternation import Alternation, Candidate
from planner.latency_bound.placing.placed import Placed, Planner
from planner.latency_bound.steady_state.performance import Performance
from planner.latency_bound.steady_state.timeline import Timeline
from planner.scheduling import RequestSchedule
from planner.search.candidate_search import SearchTime

MOST_CALIBRATIONS, CALIBRATED = 3, 0.02
"""How often the factor is measured at most, and the share by which it may still change."""


CHECKS = ((1.0, 1.0), (0.998, 0.9), (0.99, 0.8), (0.98, 0.65), (0.95, 0.5), (0.9, 0.3), (0.8, 0.2))
"""Shares of the bound, and of the requests that may be later, with which schedules are searched for
one after the other until simulated events keep the bound."""

HALVINGS = 6
"""Simulations, each of a part of a second, where no timeline led to a schedule within the bound."""

LEAST_LATE = 40
"""Requests beyond the quantile that are to be expected in a simulation."""


@dataclass(frozen=True, eq=False)
class Scheduled:
    """A schedule where its layers lie, its `timeline`, what was `observed` in a simulation of its
    events, and the `latency_s` of that at the quantile that is bounded; `seconds` are those of the
    whole job in its steady state.
    """

    placed: Placed
    schedule: RequestSchedule
    timeline: Timeline
    observed: Observed
    latency_s: float
    seconds: float

    @property
    def requests_per_s(self) -> float:
        """Requests per second in the steady state."""
        return self.observed.requests_per_s

    def cost_s(self, theta: float) -> float:
        """Seconds of the job, a unit of sensitivity counting as `theta`."""
        return self.seconds + theta * self.placed.omega


class KindSearch:
    """Searches the schedules of one kind, at one theta and bound after another; `quantile` is that
    of the latency, and `prompts` are those of the job.
    """

    def __init__(
        self,
        planner: Planner,
        prompts: int,
        quantile: float,
        search_time: SearchTime,
        tolerance: Tolerance,
    ) -> None:
        self._alternation = Alternation(planner, prompts, search_time, tolerance)
        self._search_time = search_time
        self._simulated: dict[tuple[Hashable, Point], Scheduled] = {}
        self._prompts, self._quantile, self._tolerance = prompts, quantile, tolerance
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
        found, below = self._calibrated(theta, bound_s), None
        if found is not None:
            point = found.point
            for share, late in CHECKS:
                quantile = 1 - late * (1 - self._quantile)
                refined = self._refined(found, share * bound_s, quantile)
                if refined is None:
                    break
                point, best = refined, self._scheduled(found.placed, refined)
                if best.latency_s <= bound_s:
                    return best
            below = kept_below(found.placed, point, bound_s, self._scheduled)
        kept = [each for each in (below, self.least) if each and each.latency_s <= bound_s]
        return min(kept, key=lambda each: each.cost_s(theta), default=None)

    def _calibrated(self, theta: float, bound_s: float) -> Candidate | None:
        """The best by estimates, as far as these are right."""
        found = self._alternation.best(theta, bound_s * self._factor)
        for _ in range(MOST_CALIBRATIONS):
            if found is None or math.isinf(bound_s) or self._search_time.is_over:
                break
            exact = self._exact(found.placed, found.point, self._quantile)
            factor = found.performance.latency_s / exact.latency_s
            if abs(factor / self._factor - 1) < CALIBRATED:
                break
            self._factor = factor
            found = self._alternation.best(theta, bound_s * factor) or found
        return found

    def _refined(self, found: Candidate, bound_s: float, quantile: float) -> Point | None:
        """The point of the best schedule near one, by timelines; or anywhere on its placement."""
        placed = found.placed
        evaluated = Evaluations(lambda point: self._exact(placed, point, quantile), bound_s)
        for ranges in (placed.around(found.point), placed.ranges):
            best = best_evaluated(ranges, evaluated, bound_s, self._tolerance)
            if best is not None:
                return best.point
        return None

    def _exact(self, placed: Placed, point: Point, quantile: float) -> Performance:
        """The performance of a point by its timeline, which is made once."""
        known = self._known.setdefault((placed.key, quantile), {})
        if point not in known:
            known[point] = placed.exact(point, quantile)
        return known[point]

    def _scheduled(self, placed: Placed, point: Point) -> Scheduled:
        """The schedule of a point, simulated once."""
        key = placed.key, point
        if key not in self._simulated:
            schedule = placed.schedule(point)
            self._simulated[key] = scheduled(placed, schedule, self._quantile, self._prompts)
        return self._simulated[key]


def kept_below(
    placed: Placed, point: Point, bound_s: float, made: Callable[[Placed, Point], Scheduled]
) -> Scheduled | None:
    """The schedule nearest to one that is too slow for the bound, on the line from there to the one
    with the least latency, that keeps it by events: latency grows with every control. `made` says
    what the schedule of a point reaches.
    """
    least = [each[0] for each in placed.ranges]
    found, low, high = None, 0.0, 1.0
    for _ in range(HALVINGS):
        share = (low + high) / 2
        tried = tuple(a + int(share * (b - a)) for a, b in zip(least, point, strict=True))
        reached = made(placed, tried)
        if reached.latency_s <= bound_s and placed.has_room(reached.schedule):
            found, low = reached, share
        else:
            high = share
    return found


def scheduled(
    placed: Placed, schedule: RequestSchedule, quantile: float, prompts: int
) -> Scheduled:
    """What a schedule of a job of so many prompts reaches where its layers lie."""
    observed = placed.observed(schedule, ceil(LEAST_LATE / (1 - quantile)))
    return Scheduled(
        placed,
        schedule,
        placed.timeline(schedule, quantile),
        observed,
        observed.latency_s(quantile),
        prompts / observed.requests_per_s,
    )
