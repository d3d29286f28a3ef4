"""Finding a plan, or the front of plans: costs, search or baseline, and remedies in refusals."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.model.shape import ModelShape
from planner.optimiser.assignment import SolveOptions
from planner.optimiser.names import BASELINE_METHODS
from planner.optimiser.solve import solve_by
from planner.options import AUTO, PlanOptions, quality_of
from planner.plan.builder import (
    build_plan,
    forecast_solution,
    plan_choice,
    solution_quality,
)
from planner.plan.kv_copies import warned_of_heads
from planner.plan.origin import origin_of
from planner.plan.parts import PlanChoice, PolicyChoice
from planner.plan.spec import PlanSpec
from planner.profiles.perplexity_fit import expected_divergence, with_quality
from planner.profiles.sensitivity import Omega, planned_importance
from planner.scheduling import COMPARED
from planner.search.baselines import baseline_solution, baselines
from planner.search.candidate_search import LEAST_SOLVE_S, SearchTime
from planner.search.in_flight import with_best_batch_size
from planner.search.pareto import PlanT, ThetaPoint, front, theta_solver, within_bounds
from planner.search.qualities import (
    ANSWER_GAP,
    CURVE_SOLVE_S,
    Chosen,
    best_by_rules,
    chosen_by_quality,
    plans_beside,
)
from planner.search.remedies import naming_remedies
from planner.search.request import (
    PlanningRequest,
    calibrated,
    costs_of,
    files_of_costs,
    with_fitting_cache,
    with_fitting_ends,
)
from planner.workload import Job, Workload
from quant.common.errors import BoundNotMetError, InfeasibleError, SpecError
from quant.scheme import HEAD_BITWIDTHS, NEAR_FULL_BITS


@dataclass(frozen=True, eq=False)
class PricedPlan:
    plan: PlanSpec
    costs: CostModel


def find_plan(
    cluster: ClusterSpec,
    shape: ModelShape,
    source: str,
    workload: Workload | Job,
    options: PlanOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> PricedPlan:
    """The best plan for `shape`, found at `source`, and its costs; SpecError for what cannot be
    planned, InfeasibleError if nothing fits.
    """
    if options.policy == AUTO:

        def find(each: PlanOptions) -> PricedPlan:
            return find_plan(cluster, shape, source, workload, each, clock)

        return _best_policy(options, find, clock)
    shape = calibrated(shape, options)
    request = PlanningRequest.of(cluster, shape, workload, options)
    with naming_remedies(request):
        found = with_fitting_cache(request, lambda each: _best_head(each, source, clock))
    origin = origin_of(cluster, options, files_of_costs(options))
    importance = planned_importance(found.plan, options, shape)
    plan = replace(found.plan, origin=origin, importance=importance)
    if warned_of_heads(plan):
        return find_plan(cluster, shape, source, workload, options.without_heads, clock)
    return replace(found, plan=plan)


SAME_SPEED = 0.01
"""Share of the time below which the first of the compared policies stays: forecasts err by more."""


def _best_policy(
    asked: PlanOptions, find: Callable[[PlanOptions], PricedPlan], clock: Callable[[], float]
) -> PricedPlan:
    """The best plan of the compared policies, which share the time; the other stands beside it."""
    end_s = clock() + asked.search_time_limit
    found: list[PricedPlan] = []
    refused: list[InfeasibleError] = []
    for number, policy in enumerate(COMPARED):
        share_s = max(LEAST_SOLVE_S, (end_s - clock()) / (len(COMPARED) - number))
        try:
            found.append(find(replace(asked.under(policy), search_time_limit=share_s)))
        except InfeasibleError as error:
            refused.append(error)
    if not found:
        raise _mildest(refused)
    best = _best_of(found, asked)
    plan = best.plan
    assert plan.origin is not None
    options = replace(plan.origin.options, search_time_limit=asked.search_time_limit)
    others = [PolicyChoice(e.plan.policy.name, plan_choice(e.plan)) for e in found if e is not best]
    beside = replace(plan.beside, other_policy=others[0] if others else None)
    plan = replace(plan, beside=beside, origin=replace(plan.origin, options=options))
    return replace(best, plan=plan)


def _best_head(request: PlanningRequest, source: str, clock: Callable[[], float]) -> PricedPlan:
    """The best plan of those with the most of `head_bits` that fit, and with fewer where these help
    (`_that_help`), where none are named only beside layers of less than 8 bit, if there is time for
    as long a search; the searches share the time.
    """
    options = request.options
    left = sorted(options.head_bits or HEAD_BITWIDTHS, reverse=True)
    end_s = clock() + options.search_time_limit
    found: list[_Searched] = []
    refused: list[InfeasibleError] = []
    while left:
        each, *left = left
        shared_by = 2 if left and options.head_bits else 1
        limit_s = max(LEAST_SOLVE_S, (end_s - clock()) / shared_by)
        asked = request.with_options(head_bits=(each,), search_time_limit=limit_s)
        try:
            found.append(_search(asked, clock))
        except InfeasibleError as error:
            refused.append(error)
            continue
        has_time = end_s - clock() > found[0].seconds
        looks = options.head_bits or (has_time and _has_few_bits(found[0].chosen, options))
        left = _that_help(found[0], request, left) if looks and len(found) == 1 else []
    if not found:
        raise _mildest(refused)
    best = found[0] if len(found) == 1 else _best_search(found, options)
    time_left = SearchTime(end_s - clock(), clock)
    return _with_others(best, source, time_left, clock, options.max_ppl_delta)


def _has_few_bits(chosen: Chosen, asked: PlanOptions) -> bool:
    """Whether a plan that was searched for has layers of less than 8 bit."""
    bits = (chosen.costs.placing.bits[each] for each in chosen.solution.assignment.bitwidth)
    return asked.method not in BASELINE_METHODS and min(bits) < NEAR_FULL_BITS


def _that_help(searched: _Searched, request: PlanningRequest, narrower: Sequence[int]) -> list[int]:
    """Of the `narrower` bits of embedding and LM head that with which the plan on the same devices
    is best, if it is better.
    """
    costs, solution = searched.chosen.costs, searched.chosen.solution
    limits = SolveOptions(time_limit_s=CURVE_SOLVE_S, relative_gap=ANSWER_GAP)
    best, helps = solution.assignment.objective, list[int]()
    for bits in narrower:
        own, _ = costs_of(request.with_options(head_bits=(bits,)))
        own = replace(own, theta=costs.theta, usable_bits=costs.usable_bits)
        problem = solution.costs(own).grouped_problem(solution.devices, solution.sizes)
        with suppress(InfeasibleError):  # in so little time
            objective = solve_by("auto", problem, limits).objective
            if objective < best:
                best, helps = objective, [bits]
    return helps


def _mildest(refused: Sequence[InfeasibleError]) -> InfeasibleError:
    """The refusal of a plan that fits, and comes nearest to a bound; else the first."""
    fits = [error for error in refused if isinstance(error, BoundNotMetError)]
    return min(fits, key=lambda error: error.reachable) if fits else refused[0]


def _best_of(found: Sequence[PricedPlan], asked: PlanOptions) -> PricedPlan:
    """The best by what was asked: the rule of a quality, a bound, or theta; with fewer bits of keys
    and values only where none has more.
    """
    most = max(each.plan.kv_bits for each in found)
    found = [each for each in found if each.plan.kv_bits == most]

    def point(priced: PricedPlan, choice: PlanChoice) -> ThetaPoint[PricedPlan]:
        seconds = priced.costs.generated_tokens / choice.tokens_per_s
        seconds *= 1 + SAME_SPEED * (priced is not found[0])
        return ThetaPoint(priced.costs.theta, seconds, choice.sensitivity, 0.0, priced, seconds)

    points = [point(each, plan_choice(each.plan)) for each in found]
    fast = [
        point(each, other.plan)
        for each in found
        for other in each.plan.beside.qualities
        if other.quality == "fast"
    ]
    return _best_point(points, fast, asked)


def _best_point(
    points: Sequence[ThetaPoint[PlanT]], fast: Sequence[ThetaPoint[PlanT]], asked: PlanOptions
) -> PlanT:
    """The plan of the best of `points` by what was asked, beside those of quality `fast`."""
    quality = quality_of(asked)
    if quality is not None:
        fastest = min((*fast, *points), key=lambda each: each.predicted_s)
        return best_by_rules(fastest, points)[quality].plan
    if asked.max_latency_s is not None:  # all keep it
        return min(points, key=lambda each: (each.omega, each.predicted_s)).plan
    return min(points, key=lambda each: (each.cost(asked.theta or 0.0), each.omega)).plan


@dataclass(frozen=True, eq=False)
class _Searched:
    """What was chosen with one bitwidth of embedding and LM head, from `costs` of all bits."""

    costs: CostModel
    omega: Omega
    chosen: Chosen
    seconds: float


def _search(request: PlanningRequest, clock: Callable[[], float]) -> _Searched:
    (costs, omega), began = costs_of(request), clock()
    chosen = _chosen(costs, request.options, clock)
    return _Searched(costs, omega, chosen, clock() - began)


def _best_search(found: Sequence[_Searched], asked: PlanOptions) -> _Searched:
    taken, fast = list[ThetaPoint[_Searched]](), list[ThetaPoint[_Searched]]()
    for each in found:
        costs, solution = each.chosen.costs, each.chosen.solution
        seconds = forecast_solution(costs, solution).seconds
        omega = solution_quality(costs, solution)
        taken.append(ThetaPoint(costs.theta, seconds, omega, 0.0, each, seconds))
        if "fast" in each.chosen.qualities:
            point = each.chosen.qualities["fast"]
            seconds = point.predicted_s
            fast.append(ThetaPoint(point.theta, seconds, point.omega, 0.0, each, seconds))
    return _best_point(taken, fast, asked)


def _with_others(
    searched: _Searched,
    source: str,
    time_left: SearchTime,
    clock: Callable[[], float],
    max_ppl_delta: float | None,
) -> PricedPlan:
    """The plan with its forecasts, beside baselines and other plans."""
    chosen, omega, began = searched.chosen, searched.omega, clock()
    solution = chosen.solution
    if not time_left.is_over:
        solution = with_best_batch_size(chosen.costs, solution)
    solution = replace(solution, seconds=searched.seconds + clock() - began)
    found = solution.costs(chosen.costs)
    # A baseline's own costs have one bitwidth only; others beside it choose among all.
    priced = replace(solution.costs(searched.costs), theta=found.theta)
    others = tuple(baselines(priced, SearchTime(time_left.next_s(), clock)))
    plan = build_plan(found, source, solution, omega.source, others)
    plan = replace(plan, beside=plans_beside(chosen, plan.predicted, time_left, clock))
    plan = with_quality(plan, omega, plan.solver.sensitivity, max_ppl_delta)
    return PricedPlan(plan, priced)


def _chosen(costs: CostModel, asked: PlanOptions, clock: Callable[[], float]) -> Chosen:
    options = costs.options
    if options.method in BASELINE_METHODS:
        if options.max_omega is not None or options.max_latency_s is not None:
            raise SpecError(
                f"method {options.method} makes one plan, without regard to max_omega, "
                "max_ppl_delta or max_latency_s; leave them out"
            )
        return Chosen(*baseline_solution(costs))
    quality = quality_of(asked)
    if quality is not None:
        return chosen_by_quality(costs, quality, clock)
    return Chosen(*within_bounds(costs, clock))


@dataclass(frozen=True, repr=False)
class FrontPoint:
    """One plan of the front; plan with its `theta` to get it again. `objective_latency_s` is the
    closed form that was optimised, `latency_s` the simulation's, `bits` the mean of a layer,
    `divergence` in nats a token what `omega` is expected to be.
    """

    theta: float
    latency_s: float
    objective_latency_s: float
    tokens_per_s: float
    in_flight: int
    omega: float
    bits: float
    divergence: float | None = None

    def __repr__(self) -> str:
        loss = f"omega {self.omega:.4g}"
        if self.divergence is not None:
            loss = f"perplexity {math.expm1(self.divergence):+.2%}"
        return (
            f"FrontPoint(theta={self.theta:.4g}: {self.latency_s:.4g} s, {self.tokens_per_s:.4g} "
            f"tokens/s, {loss}, {self.bits:.3g} bits a layer)"
        )


def trace_front(
    cluster: ClusterSpec,
    shape: ModelShape,
    workload: Workload | Job,
    options: PlanOptions,
    most_points: int = 12,
) -> tuple[FrontPoint, ...]:
    """Points from the fastest plan to the one of the best quality; errors as `find_plan`."""
    request = PlanningRequest.of(cluster, shape, workload, options)
    with naming_remedies(request):
        return with_fitting_ends(request, lambda each: _trace(each, most_points))


def _trace(request: PlanningRequest, most_points: int) -> tuple[FrontPoint, ...]:
    costs, omega = costs_of(request)
    points = []
    for point in front(theta_solver(costs), most_points):
        points.append(
            FrontPoint(
                theta=point.theta,
                latency_s=point.predicted_s,
                objective_latency_s=point.latency_s,
                tokens_per_s=costs.generated_tokens / point.predicted_s,
                in_flight=point.plan.workload.global_batch,
                omega=point.omega,
                bits=costs.placing.mean_bits(point.plan.assignment),
                divergence=expected_divergence(omega, point.omega),
            )
        )
    return tuple(points)


def front_json(points: Sequence[FrontPoint]) -> str:
    return json.dumps([asdict(point) for point in points], indent=1) + "\n"
