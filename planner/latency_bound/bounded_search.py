"""The search over kinds of schedules within a bound on latency, and at the quality that is wanted.

Quality means what it does for any job (`planner.search.tradeoffs.qualities`), with seconds those of
the whole job in its steady state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from planner.costs.model import CostModel
from planner.latency_bound.branch_and_bound import Tolerance
from planner.latency_bound.placing.kind_search import KindSearch, Scheduled
from planner.latency_bound.placing.placed import Planner
from planner.latency_bound.placing.rra import RraPlanner
from planner.latency_bound.placing.waa import WaaPlanner
from planner.latency_bound.refusals import NoScheduleError
from planner.latency_bound.request import BoundRequest
from planner.options import Quality, quality_of
from planner.scheduling import ScheduleKind
from planner.search.candidate_search import SearchTime
from planner.search.tradeoffs.pareto import Point, fastest_within
from planner.search.tradeoffs.qualities import (
    MOST_STEPS,
    SLOWER,
    STEP,
    TIE_BREAK,
    best_by_rules,
    seconds_per_sensitivity,
)
from planner.workload import Job

TOLERANCE = Tolerance()

PlannerOf = Callable[[CostModel, Job, BoundRequest, Callable[[], float]], Planner]

PLANNERS: dict[ScheduleKind, PlannerOf] = {
    "rra": RraPlanner,
    "waa-c": partial(WaaPlanner, "waa-c"),
    "waa-m": partial(WaaPlanner, "waa-m"),
}


@dataclass(frozen=True, eq=False)
class Least:
    """The schedule of one kind with the least latency."""

    kind: ScheduleKind
    latency_s: float


class BoundedSearch:
    """Searches the schedules of all kinds that are allowed, for one bound after another."""

    def __init__(
        self,
        costs: CostModel,
        job: Job,
        request: BoundRequest,
        clock: Callable[[], float],
        tolerance: Tolerance = TOLERANCE,
    ) -> None:
        self._costs = costs
        search_time = SearchTime(costs.options.search_time_limit, clock)
        self._kinds = {
            kind: KindSearch(
                PLANNERS[kind](costs, job, request, clock),
                job.prompts,
                request.quantile,
                search_time,
                tolerance,
            )
            for kind in request.kinds
        }

    @property
    def evaluations(self) -> int:
        """Points of controls that were evaluated."""
        return sum(each.evaluations for each in self._kinds.values())

    @property
    def least(self) -> Least | None:
        """The least latency that was found; None where nothing fits."""
        found = [
            Least(kind, each.least.latency_s)
            for kind, each in self._kinds.items()
            if each.least is not None
        ]
        return min(found, key=lambda each: each.latency_s, default=None)

    def within(self, bound_s: float) -> Scheduled:
        """The schedule within the bound, at the quality that the options ask for.

        NoScheduleError where none keeps it, `BoundNotMetError` where none has the quality.
        """
        options = self._costs.options
        quality = quality_of(options)
        if quality is not None:
            return self._of_quality(quality, bound_s)
        if options.max_omega is None:
            return self.at(self._costs.theta, bound_s)
        choice = fastest_within(lambda theta: self._point(theta, bound_s), options.max_omega)
        return choice.point.plan

    def at(self, theta: float, bound_s: float) -> Scheduled:
        """The best schedule of all kinds at one theta; errors as in `within`."""
        found = [each.best(theta, bound_s) for each in self._kinds.values()]
        kept = [each for each in found if each is not None]
        if not kept:
            raise NoScheduleError(f"no schedule within {bound_s:g} s")
        return min(kept, key=lambda each: each.cost_s(theta))

    def _point(self, theta: float, bound_s: float) -> Point[Scheduled]:
        best = self.at(theta, bound_s)
        return Point(theta, best.seconds, best.placed.omega, 0.0, best, best.seconds)

    def _of_quality(self, quality: Quality, bound_s: float) -> Scheduled:
        """The schedule of a quality, by the rules for jobs."""
        fast = self._point(TIE_BREAK * seconds_per_sensitivity(self._costs), bound_s)
        found = [fast]
        if fast.omega > 0 and quality != "fast":
            theta = SLOWER * fast.predicted_s / fast.omega
            found.append(self._point(theta, bound_s))
            if quality == "high":
                found += self._towards_high(theta, bound_s, found)
        return best_by_rules(found)[quality].plan

    def _towards_high(
        self, theta: float, bound_s: float, known: list[Point[Scheduled]]
    ) -> list[Point[Scheduled]]:
        """Points of ever less sensitivity, about as slow as is allowed."""
        limit_s = min(point.predicted_s for point in known) / (1 - SLOWER)
        found, low, high = list[Point[Scheduled]](), theta, math.inf
        for _ in range(MOST_STEPS):
            theta = low * STEP if math.isinf(high) else math.sqrt(low * high)
            found.append(self._point(theta, bound_s))
            if found[-1].predicted_s > limit_s:
                high = theta
            else:
                low = theta
        return found
