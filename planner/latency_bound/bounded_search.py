"""The search over kinds of schedules within a bound on latency, and at the quality that is wanted.

Quality means what it does for any job (`planner.search.tradeoffs.qualities`), with seconds those of
the whole job in its steady state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
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
    TIE_BREAK,
    best_by_rules,
    bits_by_quality,
    has_only,
    seconds_per_sensitivity,
    slowest_high_s,
    theta_of_tenth,
    towards_high,
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
        self._costs, self._job, self._request, self._clock = costs, job, request, clock
        self._search_time = SearchTime(costs.options.search_time_limit, clock)
        self._tolerance = tolerance
        self._kinds_of_bits: dict[tuple[int, ...], dict[ScheduleKind, KindSearch]] = {}

    @property
    def evaluations(self) -> int:
        """Points of controls that were evaluated."""
        searches = self._kinds_of_bits.values()
        return sum(each.evaluations for kinds in searches for each in kinds.values())

    @property
    def least(self) -> Least | None:
        """The least latency that was found; None where nothing fits."""
        found = [
            Least(kind, each.least.latency_s)
            for kinds in self._kinds_of_bits.values()
            for kind, each in kinds.items()
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

    def at(
        self, theta: float, bound_s: float, usable_bits: tuple[int, ...] | None = None
    ) -> Scheduled:
        """The best schedule of all kinds at one theta, with layers of these bits (None: of all);
        errors as in `within`.
        """
        kinds = self._kinds(usable_bits or self._costs.bits)
        found = [each.best(theta, bound_s) for each in kinds.values()]
        kept = [each for each in found if each is not None]
        if not kept:
            raise NoScheduleError(f"no schedule within {bound_s:g} s")
        return min(kept, key=lambda each: each.cost_s(theta))

    def _kinds(self, bits: tuple[int, ...]) -> Mapping[ScheduleKind, KindSearch]:
        """The searches for schedules of each kind with layers of these bits."""
        if bits not in self._kinds_of_bits:
            costs, request = replace(self._costs, usable_bits=bits), self._request
            self._kinds_of_bits[bits] = {
                kind: KindSearch(
                    PLANNERS[kind](costs, self._job, request, self._clock),
                    self._job.prompts,
                    request.quantile,
                    self._search_time,
                    self._tolerance,
                )
                for kind in request.kinds
            }
        return self._kinds_of_bits[bits]

    def _point(
        self, theta: float, bound_s: float, usable_bits: tuple[int, ...] | None = None
    ) -> Point[Scheduled]:
        best = self.at(theta, bound_s, usable_bits)
        return Point(theta, best.seconds, best.placed.omega, 0.0, best, best.seconds)

    def _of_quality(self, quality: Quality, bound_s: float) -> Scheduled:
        """The schedule of a quality, by the rules for jobs: a bound that no schedule near 16 bit
        keeps asks for fewer bits, as short memory does.
        """
        fast = self._point(TIE_BREAK * seconds_per_sensitivity(self._costs), bound_s)
        if quality == "fast" or not fast.omega:
            return fast.plan
        for bits in bits_by_quality(self._costs.bits):

            def solve(theta: float, bits: tuple[int, ...] = bits, **_: bool) -> Point[Scheduled]:
                return self._point(theta, bound_s, bits)

            with suppress(NoScheduleError):
                balanced = solve(theta_of_tenth(fast))
                placed = fast.plan.placed.placements
                is_usable = all(has_only(bits, self._costs, each.solution) for each in placed)
                found = [balanced, fast] if is_usable else [balanced]
                if quality == "high" and balanced.omega:
                    found += towards_high(solve, balanced, slowest_high_s(found))
                return best_by_rules(fast, found)[quality].plan
        return fast.plan
