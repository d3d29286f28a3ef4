"""The search over kinds of schedules within a bound on latency, and at the quality that is wanted.

Each kind is searched by estimates, then by timelines near the best. The estimates' latencies are
off by some factor, which is measured where the search ends; then it goes on with the bound that
much wider or tighter. What is found is simulated event by event, and where that does not keep the
bound, the search goes on with a tighter one and for more requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from planner.costs.model import CostModel
from planner.costs.stored_bytes import model_weight_bytes
from planner.latency_bound.alternation import Alternation, KindPlanner, PlacedPoint, ScheduleSpace
from planner.latency_bound.branch_and_bound import (
    ControlPoint,
    Evaluations,
    best_within,
)
from planner.latency_bound.rra import RraPlanner
from planner.latency_bound.schedules import BOUND, BoundRequest
from planner.latency_bound.simulate import ObservedRequests
from planner.latency_bound.timeline import Performance
from planner.latency_bound.waa import WaaPlanner
from planner.model.tensor_parallel import hands_over
from planner.options import AUTO, Quality, quality_of
from planner.scheduling import RequestSchedule, ScheduleKind
from planner.search.candidate_search import SearchTime
from planner.search.fitting import misfit
from planner.search.pareto import ThetaPoint, fastest_within
from planner.search.qualities import (
    TIE_BREAK,
    best_by_rules,
    bits_by_quality,
    has_only,
    seconds_per_sensitivity,
    slowest_high_s,
    theta_of_tenth,
    towards_high,
)
from planner.search.remedies import rounded_up
from quant.common.errors import BoundNotMetError, DoesNotFitError, InfeasibleError, SpecError
from quant.common.units import GIB

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
    """A schedule where layers lie, the wait for a turn by its timeline, and what was `observed` by
    events.
    """

    placed: ScheduleSpace
    schedule: RequestSchedule
    admission_wait_s: float
    observed: ObservedRequests

    @classmethod
    def of(cls, placed: ScheduleSpace, schedule: RequestSchedule) -> Scheduled:
        quantile = placed.request.quantile
        observed = placed.observed(schedule, ceil(LEAST_LATE / (1 - quantile)))
        wait_s = placed.timeline(schedule, quantile).admission_wait_s
        return cls(placed, schedule, wait_s, observed)

    @cached_property
    def latency_s(self) -> float:
        """Latency at the bounded quantile."""
        return self.observed.latency_s(self.placed.request.quantile)

    @property
    def seconds(self) -> float:
        """Seconds of the whole job in its steady state."""
        return self.placed.job.prompts / self.observed.requests_per_s

    @property
    def requests_per_s(self) -> float:
        return self.observed.requests_per_s

    def cost_s(self, theta: float) -> float:
        """Seconds of the job, a unit of sensitivity counting as `theta`."""
        return self.seconds + theta * self.placed.omega


class KindSearch:
    """Searches the schedules of one kind, at one theta and bound after another."""

    def __init__(self, planner: KindPlanner, search_time: SearchTime) -> None:
        self._alternation = Alternation(planner, search_time)
        self._quantile, self._search_time = planner.request.quantile, search_time
        self._simulated: dict[tuple[Hashable, ControlPoint], Scheduled] = {}
        self._factor = 1.0
        self._known: dict[Hashable, dict[ControlPoint, Performance]] = {}

    @property
    def evaluations(self) -> int:
        return self._alternation.evaluations + sum(map(len, self._known.values()))

    @property
    def least(self) -> Scheduled | None:
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

    def _calibrated(self, theta: float, bound_s: float) -> PlacedPoint | None:
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

    def _refined(self, found: PlacedPoint, bound_s: float, quantile: float) -> ControlPoint | None:
        placed = found.placed
        evaluated = Evaluations(lambda point: self._exact(placed, point, quantile), bound_s)
        for ranges in (placed.around(found.point), placed.ranges):
            best = best_within(ranges, evaluated)
            if best is not None:
                return best
        return None

    def _exact(self, placed: ScheduleSpace, point: ControlPoint, quantile: float) -> Performance:
        known = self._known.setdefault((placed.key, quantile), {})
        if point not in known:
            known[point] = placed.exact(point, quantile)
        return known[point]

    def _scheduled(self, placed: ScheduleSpace, point: ControlPoint) -> Scheduled:
        key = placed.key, point
        if key not in self._simulated:
            self._simulated[key] = Scheduled.of(placed, placed.schedule(point))
        return self._simulated[key]


def kept_below(
    placed: ScheduleSpace,
    point: ControlPoint,
    bound_s: float,
    made: Callable[[ScheduleSpace, ControlPoint], Scheduled],
) -> Scheduled | None:
    """The schedule nearest to a too slow one, towards the least latency, that keeps the bound by
    events: latency grows with every control. `made` says what a point reaches.
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


def bound_not_met(request: BoundRequest, least_s: float, kind: str) -> BoundNotMetError:
    """The error for a bound below `least_s`, the least latency that a schedule of `kind` has."""
    reachable = rounded_up(least_s)
    return BoundNotMetError(
        f"no schedule has {100 * request.quantile:g} % of requests done within "
        f"{request.limit_s:g} s; the least bound that was found feasible is {reachable:g} s "
        f"({kind}): --{BOUND} {reachable:g}",
        BOUND,
        reachable,
    )


def without_groups(costs: CostModel) -> CostModel:
    """The costs of stages that hand over, which are no groups where ranks of these cannot;
    SpecError where groups are asked for.
    """
    asked = costs.options.tensor_parallel
    if asked == 1 or hands_over(costs.shape):
        return costs
    if asked != AUTO:
        raise SpecError(
            f"tensor_parallel is {asked}, but groups cannot hand over what {costs.shape.name} "
            "keeps: its layers differ in heads or have constant states; use a schedule rra, or "
            f"--tensor_parallel {AUTO}"
        )
    return replace(costs, options=replace(costs.options, tensor_parallel=1))


def _nothing_fits(costs: CostModel, request: BoundRequest) -> InfeasibleError:
    if "rra" in request.kinds:
        return misfit(costs)
    name, kinds = costs.shape.name, " and ".join(request.kinds)
    needs = f"{kinds} keep two copies of all layers, one where prompts are prefilled and one where "
    remedy = "use a schedule rra, which needs one"
    devices = costs.cluster.devices
    if len(devices) == 1:
        return DoesNotFitError(f"{needs}requests decode, but there is one device; {remedy}")
    bits = min(costs.options.bits)
    copy = min(
        device.degree
        * model_weight_bytes(costs.shape_on(device), bits, device, costs.dtype(device))
        for device in devices
    )
    offered = sum(device.degree * costs.limit_bytes(device) for device in devices)
    return DoesNotFitError(
        f"{needs}requests decode: two of {name} need {2 * copy / GIB:.1f} GiB at {bits} bit, and "
        f"room for keys and values, of {offered / GIB:.1f} GiB that the devices have, which cannot "
        f"be divided so that either side has enough; {remedy}"
    )


class _NoScheduleError(Exception):
    """No schedule keeps a bound, or none fits."""


class BoundedSearch:
    def __init__(self, costs: CostModel, request: BoundRequest, clock: Callable[[], float]) -> None:
        assert costs.job is not None, "schedules are planned for a job"
        self._costs, self._job, self._request, self._clock = costs, costs.job, request, clock
        self._search_time = SearchTime(costs.options.search_time_limit, clock)
        self._kinds_of_bits: dict[tuple[int, ...], dict[ScheduleKind, KindSearch]] = {}

    @property
    def evaluations(self) -> int:
        searches = self._kinds_of_bits.values()
        return sum(each.evaluations for kinds in searches for each in kinds.values())

    @property
    def least(self) -> tuple[float, ScheduleKind] | None:
        """The least latency found, in seconds, and its schedule's kind; None where nothing fits."""
        found = [
            (each.least.latency_s, kind)
            for kinds in self._kinds_of_bits.values()
            for kind, each in kinds.items()
            if each.least is not None
        ]
        return min(found, key=lambda each: each[0], default=None)

    def within(self, bound_s: float) -> Scheduled:
        """The schedule within the bound at the options' quality; `BoundNotMetError` with the least
        feasible bound, InfeasibleError where nothing fits.
        """
        try:
            return self._within(bound_s)
        except _NoScheduleError:
            if self.least is None:
                raise _nothing_fits(self._costs, self._request) from None
            raise bound_not_met(self._request, *self.least) from None

    def _within(self, bound_s: float) -> Scheduled:
        options = self._costs.options
        quality = quality_of(options)
        if quality is not None:
            return self._of_quality(quality, bound_s)
        if options.max_omega is None:
            return self.at(self._costs.theta, bound_s)
        point, _ = fastest_within(
            lambda theta: self._point(theta, bound_s), options.max_omega, self._search_time
        )
        return point.plan

    def at(
        self, theta: float, bound_s: float, usable_bits: tuple[int, ...] | None = None
    ) -> Scheduled:
        """The best schedule of all kinds at one theta, with layers of these bits (None: of all)."""
        kinds = self._kinds(usable_bits or self._costs.bits)
        kept = list[Scheduled]()
        for each in kinds.values():
            if kept and self._search_time.is_over:
                break
            best = each.best(theta, bound_s)
            kept += [] if best is None else [best]
        if not kept:
            raise _NoScheduleError(f"no schedule within {bound_s:g} s")
        return min(kept, key=lambda each: each.cost_s(theta))

    def _kinds(self, bits: tuple[int, ...]) -> Mapping[ScheduleKind, KindSearch]:
        if bits not in self._kinds_of_bits:
            costs, asked = replace(self._costs, usable_bits=bits), self._request
            given = self._job, asked, self._clock
            planners: list[KindPlanner] = []
            for kind in asked.kinds:
                if kind == "rra":
                    planners.append(RraPlanner(kind, costs, *given))
                else:
                    planners.append(WaaPlanner(kind, without_groups(costs), *given))
            searches = (KindSearch(each, self._search_time) for each in planners)
            self._kinds_of_bits[bits] = dict(zip(asked.kinds, searches, strict=True))
        return self._kinds_of_bits[bits]

    def _point(
        self, theta: float, bound_s: float, usable_bits: tuple[int, ...] | None = None
    ) -> ThetaPoint[Scheduled]:
        best = self.at(theta, bound_s, usable_bits)
        return ThetaPoint(theta, best.seconds, best.placed.omega, 0.0, best, best.seconds)

    def _of_quality(self, quality: Quality, bound_s: float) -> Scheduled:
        """The schedule of a quality; a bound that none near 16 bit keeps asks for fewer bits."""
        fast = self._point(TIE_BREAK * seconds_per_sensitivity(self._costs), bound_s)
        if quality == "fast" or not fast.omega:
            return fast.plan
        for bits in bits_by_quality(self._costs.bits):

            def solve(
                theta: float, bits: tuple[int, ...] = bits, **_: bool
            ) -> ThetaPoint[Scheduled]:
                return self._point(theta, bound_s, bits)

            placed = fast.plan.placed.placements
            is_usable = all(has_only(bits, self._costs, each.solution) for each in placed)
            if is_usable and self._search_time.is_over:
                return fast.plan
            with suppress(_NoScheduleError):
                balanced = solve(theta_of_tenth(fast))
                found = [balanced, fast] if is_usable else [balanced]
                if quality == "high" and balanced.omega and not self._search_time.is_over:
                    found += towards_high(solve, balanced, slowest_high_s(found))
                return best_by_rules(fast, found)[quality].plan
        return fast.plan
