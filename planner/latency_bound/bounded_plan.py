"""The plan with the most throughput within a bound on the latency of requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from planner.cluster.spec import ClusterSpec
from planner.costs.memory import layer_weight_bytes
from planner.costs.model import CostModel
from planner.latency_bound.bounded_search import BoundedSearch, NoScheduleError, Scheduled
from planner.latency_bound.placed_layers import PlacedLayers
from planner.latency_bound.schedules import BOUND, BoundRequest, cycle_of, job_of, most_in_group
from planner.latency_bound.waa import prompts_in_flight
from planner.model.shape import ModelShape
from planner.optimiser.names import BASELINE_METHODS
from planner.optimiser.problem import JobPasses
from planner.options import AUTO, PlanOptions
from planner.plan.builder import build_plan
from planner.plan.origin import origin_of
from planner.plan.parts import LatencyForecast
from planner.plan.spec import PlanSpec, Role, StagePlan
from planner.quality.perplexity_fit import perplexity_forecast
from planner.quality.sensitivity import planned_importance
from planner.scheduling import BOUNDED, PolicyOptions, RequestSchedule
from planner.search.fitting import misfit
from planner.search.remedies import naming_remedies, rounded_up
from planner.search.request import (
    PlanningRequest,
    check_stored,
    costs_of,
    files_of_costs,
    with_fitting_cache,
)
from planner.simulation.job_simulation import Forecast
from planner.workload import Job, MicroBatches
from quant.common.errors import BoundNotMetError, DoesNotFitError, InfeasibleError, SpecError
from quant.common.units import GIB


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


def nothing_fits(costs: CostModel, request: BoundRequest) -> InfeasibleError:
    return misfit(costs) if "rra" in request.kinds else _two_copies(costs, request)


def _two_copies(costs: CostModel, request: BoundRequest) -> DoesNotFitError:
    name, kinds = costs.shape.name, " and ".join(request.kinds)
    needs = f"{kinds} keep two copies of all layers, one where prompts are prefilled and one where "
    remedy = "use a schedule rra, which needs one"
    devices = costs.cluster.devices
    if len(devices) == 1:
        return DoesNotFitError(f"{needs}requests decode, but there is one device; {remedy}")
    bits = min(costs.options.bits)
    copy = costs.shape.layers * min(
        device.degree
        * layer_weight_bytes(costs.shape_on(device), bits, device, costs.dtype(device))
        for device in devices
    )
    offered = sum(device.degree * costs.limit_bytes(device) for device in devices)
    return DoesNotFitError(
        f"{needs}requests decode: two of {name} need {2 * copy / GIB:.1f} GiB at {bits} bit, and "
        f"room for keys and values, of {offered / GIB:.1f} GiB that the devices have, which cannot "
        f"be divided so that either side has enough; {remedy}"
    )


def bounded_plan(
    scheduled: Scheduled, costs: CostModel, request: BoundRequest, source: str, omega_source: str
) -> PlanSpec:
    """The plan of a schedule for the model at `source`; `costs`: those searched, of all devices."""
    schedule, job = scheduled.schedule, costs.job
    assert job is not None, "schedules are planned for a job"
    placement, *prefilling = scheduled.placed.placements
    prefills = 1 if prefilling else schedule.prefill_micro_batch
    sizes = MicroBatches(prefills, most_in_group(schedule))
    workload = costs.in_flight(job, schedule.most_in_flight)
    cycle = cycle_of(schedule, job)
    placed = replace(placement.costs, cluster=costs.cluster, cycle=cycle)
    forecast = _forecast(placement, cycle.passes(sizes), scheduled.seconds, job)
    solution = replace(placement.solution, workload=workload, sizes=sizes)
    plan = build_plan(placed, source, solution, omega_source, forecast=forecast)
    plan = replace(plan, policy=PolicyOptions(BOUNDED, schedule=schedule))
    if not prefilling:
        return plan
    return _divided(plan, _prefill_plan(prefilling[0], plan, schedule, costs))


def _prefill_plan(
    placement: PlacedLayers, plan: PlanSpec, schedule: RequestSchedule, costs: CostModel
) -> PlanSpec:
    """The plan of the stages that prefill: a batch of all that they have in flight."""
    assert costs.job is not None, "schedules are planned for a job"
    sizes = MicroBatches(schedule.prefill_micro_batch, 1)
    workload = prompts_in_flight(schedule, len(placement.devices), costs.job)
    placed = replace(placement.costs, cluster=costs.cluster, job=None, cycle=None)
    solution = replace(placement.solution, workload=workload, sizes=sizes)
    return build_plan(placed, plan.model.source, solution, plan.sensitivity_source)


def _divided(plan: PlanSpec, prefills: PlanSpec) -> PlanSpec:
    used = {name for stage in prefills.stages for name in stage.device_names}
    prefills = replace(prefills, unused_devices=(), stages=_with_role(prefills, "prefill"))
    return replace(
        plan,
        stages=_with_role(plan, "decode"),
        unused_devices=tuple(name for name in plan.unused_devices if name not in used),
        prefill_plan=prefills,
    )


def _with_role(plan: PlanSpec, role: Role) -> tuple[StagePlan, ...]:
    return tuple(replace(stage, role=role) for stage in plan.stages)


def latency_forecast(
    scheduled: Scheduled, request: BoundRequest, evaluations: int
) -> LatencyForecast:
    rate = scheduled.requests_per_s
    return LatencyForecast(
        lengths=request.lengths,
        quantile=request.quantile,
        bound_s=request.bound_s,
        requests_per_s=rate,
        tokens_per_s=rate * request.lengths.outputs.mean,
        latency_s=scheduled.latency_s,
        mean_latency_s=scheduled.observed.mean_latency_s,
        admission_wait_s=scheduled.timeline.admission_wait_s,
        evaluations=evaluations,
    )


def _forecast(placement: PlacedLayers, passes: JobPasses, seconds: float, job: Job) -> Forecast:
    lengths, times = job.lengths, placement.times
    prompts = np.array(lengths.prompt_tokens)
    prefill_s = passes.prefills * np.mean(
        [times.prefill_s(passes.prefill_requests, float(each)) for each in prompts], axis=0
    )
    decode_s = passes.decode_steps * times.decode_s(passes.decode_requests, lengths.mean_context)
    busy_s = prefill_s + decode_s
    busiest = int(busy_s.argmax())
    return Forecast(
        seconds=seconds,
        prefill_s=seconds * float(prefill_s[busiest] / busy_s[busiest]),
        tokens_per_s=job.output_tokens / seconds,
        busy_s=(prefill_s, decode_s),
        busy_share=tuple(np.minimum(busy_s / seconds, 1.0).tolist()),
    )


_DECIDED = ("prefill_micro_batch", "decode_micro_batch", "max_batch_size")
"""Options that the schedule decides."""


def find_bounded_plan(
    cluster: ClusterSpec,
    shape: ModelShape,
    source: str,
    request: BoundRequest,
    options: PlanOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> PlanSpec:
    """The plan with the most throughput within the bound; `SpecError` for what cannot be planned,
    `BoundNotMetError` with the least feasible bound, `InfeasibleError` where nothing fits.
    """
    options = bounded_options(options)
    check_stored(shape, options)
    planned = PlanningRequest.of(cluster, shape, job_of(request), options)

    def find(chosen: PlanOptions) -> PlanSpec:
        return _found(replace(planned, options=chosen), source, request, clock)

    try:
        found = with_fitting_cache(options, find)
    except InfeasibleError as error:
        if isinstance(error, BoundNotMetError) or "rra" not in request.kinds:
            raise  # there are no remedies beside those that it names
        with naming_remedies(planned):
            raise
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
        raise bound_not_met(request, *least) from None
    plan = bounded_plan(scheduled, costs, request, source, omega.source)
    forecast = perplexity_forecast(omega, scheduled.placed.omega, planned.options.max_ppl_delta)
    return replace(
        plan,
        latency=latency_forecast(scheduled, request, search.evaluations),
        perplexity=forecast,
        solver=replace(plan.solver, seconds=clock() - began),
    )
