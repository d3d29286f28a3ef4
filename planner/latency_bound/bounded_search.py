"""The search over kinds of schedules within a bound on latency, and at the quality that is wanted.

`planner.latency_bound.judged` searches each kind, and judges by events what is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from planner.costs.model import CostModel
from planner.costs.stored_bytes import model_weight_bytes
from planner.latency_bound.alternation import KindPlanner
from planner.latency_bound.judged import KindSearch, Scheduled, TimeIsUpError
from planner.latency_bound.rra import RraPlanner
from planner.latency_bound.schedules import BOUND, BoundRequest
from planner.latency_bound.waa import WaaPlanner
from planner.model.tensor_parallel import hands_over
from planner.options import AUTO, PLAN_TIME, QUALITIES, PlanOptions, Quality, quality_of
from planner.plan.parts import PlanChoice, PlansBeside, QualityChoice
from planner.scheduling import ScheduleKind
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

PART = 0.6
"""Share of the time that the first search has of those that a quality needs."""


def bound_not_met(request: BoundRequest, least_s: float, kind: str) -> BoundNotMetError:
    """The error for a bound below `least_s`, the least latency that a schedule of `kind` has."""
    reachable = rounded_up(least_s / request.aimed_s(1.0))
    return BoundNotMetError(
        f"no schedule has {100 * request.quantile:g} % of requests done within "
        f"{request.bound_s:g} s; the least bound that was found feasible is {reachable:g} s "
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


def search_time_of(options: PlanOptions, clock: Callable[[], float]) -> SearchTime:
    """What a search for schedules has of the time limit, from now on."""
    return SearchTime(PLAN_TIME * options.search_time_limit, clock)


class _NoScheduleError(Exception):
    """No schedule keeps a bound, or none fits."""


class BoundedSearch:
    """A first schedule within a bound is looked for however long that takes. From then on every
    look ends with `search_time`: before a pass of a simulation, a timeline, an estimate or a
    placement, whose solver has no more seconds than are left.
    """

    def __init__(
        self,
        costs: CostModel,
        request: BoundRequest,
        clock: Callable[[], float],
        search_time: SearchTime | None = None,
    ) -> None:
        assert costs.job is not None, "schedules are planned for a job"
        self._costs, self._job, self._request, self._clock = costs, costs.job, request, clock
        self._search_time = search_time or search_time_of(costs.options, clock)
        self._bound_s = math.inf
        self._kinds_of_bits: dict[tuple[int, ...], dict[ScheduleKind, KindSearch]] = {}
        self._points: dict[tuple[float, float, tuple[int, ...] | None], ThetaPoint[Scheduled]] = {}

    @property
    def evaluations(self) -> int:
        return sum(each.evaluations for each in self._searches)

    @property
    def _searches(self) -> Iterator[KindSearch]:
        for kinds in self._kinds_of_bits.values():
            yield from kinds.values()

    def _check_time(self) -> None:
        if self.is_over and any(each.has(self._bound_s) for each in self._searches):
            raise TimeIsUpError

    @property
    def least(self) -> tuple[float, ScheduleKind] | None:
        """The least latency found, in seconds, and its schedule's kind; None where nothing fits."""
        found = [least for each in self._searches if (least := each.least) is not None]
        least = min(found, key=lambda each: each.latency_s, default=None)
        return None if least is None else (least.latency_s, least.schedule.kind)

    @property
    def is_over(self) -> bool:
        return self._search_time.is_over

    def fastest(self, bound_s: float) -> Scheduled:
        """The best of quality `fast` of all that were seen to keep a bound that some do."""
        return min(self._seen(bound_s), key=lambda each: each.cost_s(self._theta_of_fast))

    def finest(self, bound_s: float) -> Scheduled | None:
        """The fastest schedule of the most bits alone; None where none keeps the bound."""
        with suppress(_NoScheduleError):
            return self.at(0.0, bound_s, (max(self._costs.bits),))
        return None

    def within(self, bound_s: float, quality: Quality | None = None) -> Scheduled:
        """The schedule within the bound at a quality, or as the options say; `BoundNotMetError`
        with the least feasible bound, InfeasibleError where nothing fits.
        """
        try:
            return self._within(bound_s, quality or quality_of(self._costs.options))
        except _NoScheduleError:
            if self.least is None:
                raise _nothing_fits(self._costs, self._request) from None
            raise bound_not_met(self._request, *self.least) from None

    def _within(self, bound_s: float, quality: Quality | None) -> Scheduled:
        options = self._costs.options
        if quality is not None:
            return self._of_quality(quality, bound_s)
        if options.max_omega is None:
            return self._of_theta(self._costs.theta, bound_s)
        point, _ = fastest_within(
            lambda theta: self._point(theta, bound_s), options.max_omega, self._search_time
        )
        return point.plan

    def at(
        self,
        theta: float,
        bound_s: float,
        usable_bits: tuple[int, ...] | None = None,
        share: float = 1.0,
    ) -> Scheduled:
        """The best schedule of all kinds at one theta, with layers of these bits (None: of all), in
        such a share of the time that is left.
        """
        self._bound_s = bound_s
        kinds = self._kinds(usable_bits or self._costs.bits)
        search_time = self._search_time.part(share)
        kept = list[Scheduled]()
        for left, each in zip(range(len(kinds), 0, -1), kinds.values(), strict=True):
            if kept and search_time.is_over:
                break
            best = each.best(theta, bound_s, search_time.part(1 / left))
            kept += [] if best is None else [best]
        if not kept and usable_bits is None:
            kept += self._seen(bound_s)  # of searches with fewer bitwidths, once time is up
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
            given_time = self._search_time, self._check_time
            searches = (KindSearch(each, *given_time) for each in planners)
            self._kinds_of_bits[bits] = dict(zip(asked.kinds, searches, strict=True))
        return self._kinds_of_bits[bits]

    def _point(
        self,
        theta: float,
        bound_s: float,
        usable_bits: tuple[int, ...] | None = None,
        share: float = 1.0,
    ) -> ThetaPoint[Scheduled]:
        key = theta, bound_s, usable_bits
        if key not in self._points:
            self._points[key] = _theta_point(theta, self.at(*key, share))
        return self._points[key]

    def _of_theta(self, theta: float, bound_s: float) -> Scheduled:
        """The schedule of least cost at a theta, of those near 16 bit too: with fewer choices these
        may lead to better ones.
        """
        self.at(theta, bound_s, share=PART)
        bits = next(bits_by_quality(self._costs.bits))
        if bits != self._costs.bits and not self._search_time.is_over:
            with suppress(_NoScheduleError):
                self.at(theta, bound_s, bits)
        return min(self._seen(bound_s), key=lambda each: each.cost_s(theta))

    def _seen(
        self, bound_s: float, usable_bits: tuple[int, ...] | None = None
    ) -> Iterator[Scheduled]:
        """Yield all schedules that were seen to keep the bound, with layers of these bits."""
        for search in self._searches:
            for each in search.kept(bound_s):
                placed = each.placed.placements
                if usable_bits is None or all(
                    has_only(usable_bits, self._costs, one.solution) for one in placed
                ):
                    yield each

    @cached_property
    def _theta_of_fast(self) -> float:
        return TIE_BREAK * seconds_per_sensitivity(self._costs)

    def _of_quality(self, quality: Quality, bound_s: float) -> Scheduled:
        """The schedule of a quality; a bound that none near 16 bit keeps asks for fewer bits."""
        if quality == "fast":
            return self._of_theta(self._theta_of_fast, bound_s)
        fast = self._point(self._theta_of_fast, bound_s, share=PART)
        if not fast.omega:
            return fast.plan
        for bits in bits_by_quality(self._costs.bits):

            def solve(
                theta: float, bits: tuple[int, ...] = bits, **_: bool
            ) -> ThetaPoint[Scheduled]:
                return self._point(theta, bound_s, bits)

            def found(bits: tuple[int, ...] = bits) -> list[ThetaPoint[Scheduled]]:
                return [_theta_point(fast.theta, each) for each in self._seen(bound_s, bits)]

            known = found()
            if not (known and self._search_time.is_over):
                with suppress(_NoScheduleError):
                    balanced = solve(theta_of_tenth(fast))
                    if quality == "high" and balanced.omega:
                        steps = towards_high(solve, balanced, slowest_high_s(found()))
                        while not self._search_time.is_over and next(steps, None) is not None:
                            pass
                known = found()
            if known:
                return best_by_rules(fast, known)[quality].plan
        return fast.plan


def _theta_point(theta: float, found: Scheduled) -> ThetaPoint[Scheduled]:
    return ThetaPoint(theta, found.seconds, found.placed.omega, 0.0, found, found.seconds)


def plans_beside(
    search: BoundedSearch, taken: Scheduled, quality: Quality | None, bound_s: float
) -> PlansBeside:
    """What can be found in the time that `search` has left, each within the bound; nothing where
    no quality decided.
    """
    if quality is None:
        return PlansBeside()
    found = {quality: taken}
    for each in QUALITIES:
        if each not in found and each != "fast" and not search.is_over:
            found[each] = search.within(bound_s, each)
    finest = None if search.is_over else search.finest(bound_s)
    found.setdefault("fast", search.fastest(bound_s))
    return PlansBeside(
        quality=quality,
        qualities=tuple(_quality_choice(each, found[each]) for each in QUALITIES if each in found),
        full_precision=None if finest is None else choice_of(finest),
    )


def _quality_choice(quality: Quality, found: Scheduled) -> QualityChoice:
    return QualityChoice(quality, found.placed.placements[0].costs.theta, choice_of(found))


def choice_of(found: Scheduled) -> PlanChoice:
    """Bits and sensitivity in the mean of both sides, where devices are divided."""
    placed = found.placed
    bits = [each.costs.placing.mean_bits(each.solution.assignment) for each in placed.placements]
    return PlanChoice(
        in_flight=found.schedule.most_in_flight,
        tokens_per_s=placed.job.output_tokens / found.seconds,
        sensitivity=max(0.0, placed.omega),
        mean_bits=sum(bits) / len(bits),
    )
