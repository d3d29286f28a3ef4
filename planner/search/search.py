"""Finding a plan: costs, search or baseline, and remedies where nothing fits or keeps a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.model.finding import ModelShape
from planner.optimiser.names import BASELINE_METHODS
from planner.options import AUTO, PlanOptions, quality_of
from planner.plan.builder import build_plan
from planner.plan.origin import origin_of
from planner.plan.spec import PlanSpec
from planner.quality.perplexity_fit import perplexity_forecast
from planner.quality.sensitivity import Omega, planned_importance
from planner.search.baselines.comparison import baselines
from planner.search.baselines.planned import baseline_fits, baseline_solution
from planner.search.batch_size import with_best_batch_size
from planner.search.candidate_search import SearchTime
from planner.search.candidates import Candidates
from planner.search.costs import files_of_costs, planning_costs
from planner.search.groupings import first_sets
from planner.search.job.plans_beside import plans_beside
from planner.search.remedies import Planner, PlanningRequest, naming_remedies
from planner.search.tradeoffs.bounded import within_bounds
from planner.search.tradeoffs.qualities import Chosen, chosen_by_quality
from planner.workload import Job, Workload
from quant.common.errors import BoundNotMetError, InfeasibleError, SpecError
from quant.scheme import FULL_BITS, KV_BITWIDTHS

_Found = TypeVar("_Found")


@dataclass(frozen=True, eq=False)
class PricedPlan:
    """A plan and the cost model that it was found with, which explains and simulates it."""

    plan: PlanSpec
    costs: CostModel


def find_plan(
    cluster: ClusterSpec,
    shape: ModelShape,
    source: str,
    workload: Workload | Job,
    options: PlanOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> PlanSpec:
    """The best plan for `shape` (found at `source`) on `cluster`.

    Raises `SpecError` for what cannot be planned as asked, `InfeasibleError` when nothing fits.
    """
    return find_priced_plan(cluster, shape, source, workload, options, clock).plan


def find_priced_plan(
    cluster: ClusterSpec,
    shape: ModelShape,
    source: str,
    workload: Workload | Job,
    options: PlanOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> PricedPlan:
    """Find the best plan as `find_plan` does, and return its cost model with it."""
    check_stored(shape, options)
    request = PlanningRequest.of(cluster, shape, workload, options)
    with naming_remedies(request, REMEDY_PLANNER):
        found = _find(request, source, clock)
    origin = origin_of(cluster, options, files_of_costs(options))
    importance = None
    if found.plan.needs_importance(shape.stored is not None):
        importance = planned_importance(options, shape)
    return replace(found, plan=replace(found.plan, origin=origin, importance=importance))


def check_stored(shape: ModelShape, options: PlanOptions) -> None:
    """Refuse options of rounding where the checkpoint was rounded before."""
    if shape.stored is None:
        return
    for name, is_usual in (
        ("rounding", options.rounding == PlanOptions.rounding),
        ("importance", options.importance is None or options.kv_bits != FULL_BITS),
    ):
        if not is_usual:
            raise SpecError(
                f"{name} has no effect: {shape.name} is quantized already; leave it out, or plan "
                "for the original 16-bit checkpoint"
            )


def _find(request: PlanningRequest, source: str, clock: Callable[[], float]) -> PricedPlan:
    """Find the plan, without its origin; refusals name no remedies."""
    options = request.options
    if options.kv_bits == AUTO:
        return with_fitting_cache(
            options, lambda chosen: _find(replace(request, options=chosen), source, clock)
        )
    costs, omega = costs_of(request)
    began, time_left = clock(), SearchTime(options.search_time_limit, clock)
    chosen = _chosen(costs, options, clock)
    solution = with_best_batch_size(chosen.costs, chosen.solution)
    solution = replace(solution, seconds=clock() - began)
    found = solution.costs(chosen.costs)
    # A baseline's own costs have one bitwidth only; others beside it choose among all.
    priced = replace(solution.costs(costs), theta=found.theta)
    plan = build_plan(found, source, solution, omega.source, baselines(priced))
    plan = replace(plan, beside=plans_beside(chosen, plan.predicted, time_left, clock))
    forecast = perplexity_forecast(omega, plan.solver.sensitivity, options.max_ppl_delta)
    return PricedPlan(replace(plan, perplexity=forecast), priced)


def with_fitting_cache(options: PlanOptions, find: Callable[[PlanOptions], _Found]) -> _Found:
    """Call `find` with the most bits of keys and values for which it succeeds."""
    fewest, *more = KV_BITWIDTHS
    for bits in reversed(more):
        with suppress(InfeasibleError):
            return find(replace(options, kv_bits=bits))
    return find(replace(options, kv_bits=fewest))


def _chosen(costs: CostModel, asked: PlanOptions, clock: Callable[[], float]) -> Chosen:
    """The plan that is wanted: of a quality, by theta, within a bound, or a baseline's own."""
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
    try:
        return Chosen(*within_bounds(costs, clock))
    except BoundNotMetError as error:
        if asked.max_ppl_delta is None:
            raise
        text = (
            f"{error} (max_ppl_delta {asked.max_ppl_delta:g} allows a summed sensitivity of "
            f"{options.max_omega:g})"
        )
        raise BoundNotMetError(text, error.option, error.reachable) from error


def _fits(request: PlanningRequest) -> bool:
    """Whether memory allows a plan, at any micro-batch sizes."""
    return _succeeds(request, lambda costs: bool(first_sets(costs)))


def _plans(request: PlanningRequest) -> bool:
    """Whether the search has a candidate, or with a bound a plan within it."""

    def plan(costs: CostModel) -> bool:
        if costs.options.max_omega is None and costs.options.max_latency_s is None:
            sets = (replace(costs.cluster, devices=devices) for devices in first_sets(costs))
            return any(Candidates(replace(costs, cluster=cluster)).count for cluster in sets)
        return bool(within_bounds(costs))

    return _succeeds(request, plan)


def _succeeds(request: PlanningRequest, attempt: Callable[[CostModel], bool]) -> bool:
    """Whether an attempt succeeds with one of the sizes of keys and values."""
    bits = KV_BITWIDTHS if request.options.kv_bits == AUTO else (request.options.kv_bits,)
    for each in bits:
        with suppress(InfeasibleError, SpecError):
            costs, _ = costs_of(request.with_options(kv_bits=each))
            runs = baseline_fits if costs.options.method in BASELINE_METHODS else attempt
            if runs(costs):
                return True
    return False


REMEDY_PLANNER = Planner(_fits, _plans)


def costs_of(request: PlanningRequest) -> tuple[CostModel, Omega]:
    """The cost model of a request, and the sensitivities it was made with."""
    return planning_costs(
        request.cluster, request.shape, request.workload, request.options, request.job
    )
