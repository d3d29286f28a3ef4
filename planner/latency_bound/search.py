"""Finding the plan with the most throughput within a bound on the latency of requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.cluster.spec import ClusterSpec
from planner.latency_bound.bounded_search import BoundedSearch
from planner.latency_bound.placing.job import job_of
from planner.latency_bound.plan import bounded_plan, latency_forecast
from planner.latency_bound.refusals import NoScheduleError, bound_not_met, nothing_fits
from planner.latency_bound.request import BOUND, BoundRequest
from planner.model.finding import ModelShape
from planner.optimiser.names import BASELINE_METHODS
from planner.options import AUTO, PlanOptions
from planner.plan.origin import origin_of
from planner.plan.spec import PlanSpec
from planner.quality.perplexity_fit import perplexity_forecast
from planner.quality.sensitivity import planned_importance
from planner.scheduling import BOUNDED
from planner.search.costs import files_of_costs
from planner.search.remedies import PlanningRequest, naming_remedies
from planner.search.search import REMEDY_PLANNER, check_stored, costs_of, with_fitting_cache
from quant.common.errors import BoundNotMetError, InfeasibleError, SpecError

_DECIDED = ("prefill_micro_batch", "decode_micro_batch", "max_batch_size")
"""Options that the schedule decides."""


@dataclass(frozen=True)
class _Missed:
    """There is no plan, for a reason that has no remedies beside those it names."""

    error: InfeasibleError


def find_bounded_plan(
    cluster: ClusterSpec,
    shape: ModelShape,
    source: str,
    request: BoundRequest,
    options: PlanOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> PlanSpec:
    """The plan with the most throughput for `shape` (found at `source`) within the bound.

    Raises `SpecError` for what cannot be planned as asked, `BoundNotMetError` with the least
    feasible bound, and `InfeasibleError` where nothing fits.
    """
    options = bounded_options(options)
    check_stored(shape, options)
    planned = PlanningRequest.of(cluster, shape, job_of(request), options)
    with naming_remedies(planned, REMEDY_PLANNER):
        found = _find(planned, source, request, clock)
    if isinstance(found, _Missed):
        raise found.error
    importance = None
    if found.needs_importance(shape.stored is not None):
        importance = planned_importance(options, shape)
    origin = origin_of(cluster, options, files_of_costs(options))
    return replace(found, origin=origin, importance=importance)


def bounded_options(options: PlanOptions) -> PlanOptions:
    """The options with the policy that follows a schedule; SpecError for those that it decides."""
    if options.method in BASELINE_METHODS:
        raise SpecError(
            f"method {options.method} makes one plan, without regard to the latency of requests; "
            f"leave it out, or {BOUND}"
        )
    for name in _DECIDED:
        if getattr(options, name) is not None:
            raise SpecError(f"{name} has no effect beside {BOUND}: the schedule says it")
    if options.in_flight != AUTO:
        raise SpecError(f"in_flight has no effect beside {BOUND}: the schedule says it")
    if options.max_latency_s is not None:
        raise SpecError(f"max_latency_s bounds a whole job, {BOUND} requests; give one of them")
    return replace(options, policy=BOUNDED)


def _find(
    planned: PlanningRequest, source: str, request: BoundRequest, clock: Callable[[], float]
) -> PlanSpec | _Missed:
    """The plan without its origin, or the error for a bound, or for two copies that do not fit."""

    def find(chosen: PlanOptions) -> PlanSpec:
        return _found(replace(planned, options=chosen), source, request, clock)

    try:
        if planned.options.kv_bits == AUTO:
            return with_fitting_cache(planned.options, find)
        return find(planned.options)
    except InfeasibleError as error:
        if isinstance(error, BoundNotMetError) or "rra" not in request.kinds:
            return _Missed(error)
        raise


def _found(
    planned: PlanningRequest, source: str, request: BoundRequest, clock: Callable[[], float]
) -> PlanSpec:
    job = planned.job
    assert job is not None, "schedules are planned for a job"
    costs, omega = costs_of(planned)
    began = clock()
    search = BoundedSearch(costs, job, request, clock)
    try:
        scheduled = search.within(request.limit_s)
    except NoScheduleError:
        least = search.least
        if least is None:
            raise nothing_fits(costs, request) from None
        raise bound_not_met(request, least.latency_s, least.kind) from None
    plan = bounded_plan(scheduled, costs, request, source, omega.source)
    forecast = perplexity_forecast(omega, scheduled.placed.omega, planned.options.max_ppl_delta)
    return replace(
        plan,
        latency=latency_forecast(scheduled, request, search.evaluations),
        perplexity=forecast,
        solver=replace(plan.solver, seconds=clock() - began),
    )
