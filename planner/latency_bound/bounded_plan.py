"""The plan with the most throughput within a bound on the latency of requests, and throughput
against the bound: which kind of schedule is best where, and why.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import groupby

import numpy as np

from planner.cluster.spec import ClusterSpec
from planner.costs.hosting import can_host
from planner.costs.model import CostModel
from planner.latency_bound.bounded_search import (
    BoundedSearch,
    choice_of,
    plans_beside,
    search_time_of,
)
from planner.latency_bound.judged import Scheduled
from planner.latency_bound.placed_layers import PlacedLayers
from planner.latency_bound.schedules import (
    BOUND,
    BoundRequest,
    cycle_of,
    job_of,
    margin_of,
    most_in_group,
)
from planner.latency_bound.waa import prompts_in_flight
from planner.model.shape import ModelShape
from planner.optimiser.names import BASELINE_METHODS
from planner.optimiser.problem import JobPasses
from planner.options import AUTO, PlanOptions, quality_of
from planner.plan.builder import build_plan
from planner.plan.kv_copies import warn_of_handover, warned_of_heads
from planner.plan.origin import origin_of
from planner.plan.parts import LatencyForecast
from planner.plan.spec import PlanSpec, Role, StagePlan
from planner.profiles.perplexity_fit import with_quality
from planner.profiles.sensitivity import Omega, planned_importance
from planner.scheduling import BOUNDED, PolicyOptions, RequestSchedule, ScheduleKind
from planner.search.candidate_search import SearchTime
from planner.search.remedies import naming_remedies
from planner.search.request import (
    PlanningRequest,
    calibrated,
    costs_of,
    files_of_costs,
    has_free_experts,
    with_fitting_ends,
    with_heads,
)
from planner.simulation.job_simulation import Forecast, SimulatedJob
from planner.workload import Job, MicroBatches
from quant.common.errors import BoundNotMetError, InfeasibleError, SpecError


def bounded_plan(
    scheduled: Scheduled, costs: CostModel, source: str, omega_source: str
) -> PlanSpec:
    """The plan of a schedule for the model at `source`; `costs`: those searched, of all devices."""
    schedule, job = scheduled.schedule, scheduled.placed.job
    placement, *prefilling = scheduled.placed.placements
    prompts = 1 if prefilling else schedule.prefill_micro_batch
    sizes = MicroBatches(prompts, most_in_group(schedule))
    workload = costs.in_flight(job, schedule.most_in_flight)
    cycle = cycle_of(schedule, job)
    placed = replace(placement.costs, cluster=costs.cluster, cycle=cycle)
    forecast = _forecast(placement, cycle.passes(sizes), scheduled.seconds, job)
    solution = replace(placement.solution, workload=workload, sizes=sizes)
    plan = build_plan(placed, source, solution, omega_source, forecast=forecast)
    plan = replace(plan, policy=PolicyOptions(BOUNDED, schedule=schedule))
    if not prefilling:
        return plan
    prefills = _prefill_plan(prefilling[0], plan, schedule, costs, job)
    used = {name for stage in prefills.stages for name in stage.device_names}
    prefills = replace(prefills, unused_devices=(), stages=_with_role(prefills, "prefill"))
    return replace(
        plan,
        stages=_with_role(plan, "decode"),
        unused_devices=tuple(name for name in plan.unused_devices if name not in used),
        prefill_plan=prefills,
    )


def _prefill_plan(
    placement: PlacedLayers,
    plan: PlanSpec,
    schedule: RequestSchedule,
    costs: CostModel,
    job: Job,
) -> PlanSpec:
    """The plan of the stages that prefill: a batch of all that they have in flight."""
    sizes = MicroBatches(schedule.prefill_micro_batch, 1)
    workload = prompts_in_flight(schedule, len(placement.devices), job)
    placed = replace(placement.costs, cluster=costs.cluster, job=None, cycle=None)
    solution = replace(placement.solution, workload=workload, sizes=sizes)
    return build_plan(placed, plan.model.source, solution, plan.sensitivity_source)


def _with_role(plan: PlanSpec, role: Role) -> tuple[StagePlan, ...]:
    return tuple(replace(stage, role=role) for stage in plan.stages)


def latency_forecast(scheduled: Scheduled, evaluations: int) -> LatencyForecast:
    request, rate = scheduled.placed.request, scheduled.requests_per_s
    return LatencyForecast(
        lengths=request.lengths,
        quantile=request.quantile,
        bound_s=request.bound_s,
        requests_per_s=rate,
        tokens_per_s=rate * request.lengths.outputs.mean,
        latency_s=scheduled.latency_s,
        latency_error_s=scheduled.error_s,
        margin=request.margin,
        mean_latency_s=scheduled.observed.mean_latency_s,
        admission_wait_s=scheduled.admission_wait_s,
        evaluations=evaluations,
    )


def _forecast(placement: PlacedLayers, passes: JobPasses, seconds: float, job: Job) -> Forecast:
    lengths, times = job.lengths, placement.times
    prompts = np.array(lengths.prompt_tokens)
    prefill_s = passes.prefills * np.mean(
        [times.prefill_s(passes.prefill_requests, float(each)) for each in prompts], axis=0
    )
    decode_s = passes.decode_steps * times.decode_s(passes.decode_requests, lengths.mean_context)
    busy_s = prefill_s, decode_s
    steady = SimulatedJob(job.prompts, job.output_tokens, seconds, *busy_s, ended_s=np.zeros(0))
    found = Forecast.of_job(steady)
    return replace(found, busy_share=tuple(min(share, 1.0) for share in found.busy_share))


_DECIDED = ("prefill_micro_batch", "decode_micro_batch", "max_batch_size", "in_flight")
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
    shape = calibrated(shape, options)
    search_time = search_time_of(options, clock)
    while True:
        planned = PlanningRequest.of(cluster, shape, job_of(request), options)
        plan = _with_remedies(planned, source, request, clock, search_time)
        importance = planned_importance(plan, options, shape)
        origin = origin_of(cluster, options, files_of_costs(options))
        plan = replace(plan, origin=origin, importance=importance)
        if not warned_of_heads(plan):
            warn_of_handover(plan)
            return plan
        options = options.without_heads
        request = replace(request, lengths=with_heads(request.lengths, options))


def _with_remedies(
    planned: PlanningRequest,
    source: str,
    request: BoundRequest,
    clock: Callable[[], float],
    search_time: SearchTime,
) -> PlanSpec:
    try:
        return with_fitting_ends(
            planned, lambda each: _found(each, source, request, clock, search_time)
        )
    except InfeasibleError as error:
        if isinstance(error, BoundNotMetError) or "rra" not in request.kinds:
            raise  # there are no remedies beside those that it names
        with naming_remedies(planned):
            raise


def bounded_options(options: PlanOptions) -> PlanOptions:
    """The options with the policy that follows a schedule; SpecError for those that it decides."""
    if options.method in BASELINE_METHODS:
        raise SpecError(
            f"method {options.method} makes one plan, without regard to the latency of requests; "
            f"leave it out, or {BOUND}"
        )
    for name in _DECIDED:
        if getattr(options, name) not in (None, AUTO):
            raise SpecError(f"{name} has no effect beside {BOUND}: the schedule says it")
    if options.max_latency_s is not None:
        raise SpecError(f"max_latency_s bounds a whole job, {BOUND} requests; give one of them")
    return replace(options, policy=BOUNDED)


def costs_beside_bound(planned: PlanningRequest) -> tuple[CostModel, Omega]:
    """The costs and the sensitivities, with a warning where plans without a bound could have
    experts on hosts.
    """
    costs, omega = costs_of(planned)
    if has_free_experts(planned.shape) and any(map(can_host, planned.cluster.devices)):
        text = "beside a bound on latency experts stay with the rest of their layers"
        warnings.warn(f"{text}: host_memory_gib is not used for them", stacklevel=2)
    return costs, omega


def _found(
    planned: PlanningRequest,
    source: str,
    request: BoundRequest,
    clock: Callable[[], float],
    search_time: SearchTime,
) -> PlanSpec:
    costs, omega = costs_beside_bound(planned)
    request = replace(request, margin=margin_of(costs))
    began = clock()
    search = BoundedSearch(costs, request, clock, search_time)
    scheduled = search.within(request.limit_s)
    plan = bounded_plan(scheduled, costs, source, omega.source)
    plan = with_quality(plan, omega, scheduled.placed.omega, planned.options.max_ppl_delta)
    solver = replace(plan.solver, seconds=clock() - began)
    latency = latency_forecast(scheduled, search.evaluations)
    quality = quality_of(planned.options)
    beside = plans_beside(search, scheduled, quality, request.limit_s)
    return replace(plan, latency=latency, solver=solver, beside=beside)


POINTS = 8


@dataclass(frozen=True)
class LatencyPoint:
    """The best schedule within a bound: requests and tokens per second, its latency, and the bits
    of a layer in the mean.
    """

    bound_s: float
    schedule: RequestSchedule
    requests_per_s: float
    tokens_per_s: float
    latency_s: float
    bits: float


def latency_front(
    cluster: ClusterSpec,
    shape: ModelShape,
    request: BoundRequest,
    options: PlanOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[LatencyPoint, ...]:
    """Points from the least feasible bound to that beyond which throughput does not grow, without
    the request's own bound; errors as `find_bounded_plan`.
    """
    planned = PlanningRequest.of(cluster, shape, job_of(request), bounded_options(options))
    with naming_remedies(planned) if "rra" in request.kinds else nullcontext():
        return with_fitting_ends(planned, lambda each: _front(each, request, clock))


def _front(
    planned: PlanningRequest, request: BoundRequest, clock: Callable[[], float]
) -> tuple[LatencyPoint, ...]:
    costs, _ = costs_beside_bound(planned)
    request = replace(request, margin=margin_of(costs))
    search = BoundedSearch(costs, request, clock)
    fastest = search.within(math.inf)
    least = search.least
    assert least is not None, "where a schedule was found, one has the least latency"
    bounds = np.geomspace(least[0], fastest.latency_s, POINTS) / request.aimed_s(1.0)
    kept: list[LatencyPoint] = []
    for number, bound_s in enumerate(bounds.tolist(), start=1):
        try:
            found = fastest if number == POINTS else search.within(request.aimed_s(bound_s))
        except BoundNotMetError as error:
            if error.option != BOUND:
                raise
            continue
        rate = found.requests_per_s
        if not kept or rate > kept[-1].requests_per_s:
            tokens_per_s = rate * request.lengths.outputs.mean
            bits = choice_of(found).mean_bits
            latency_s = found.latency_s
            point = LatencyPoint(bound_s, found.schedule, rate, tokens_per_s, latency_s, bits)
            kept.append(point)
    return tuple(kept)


@dataclass(frozen=True)
class LeftOut:
    kind: ScheduleKind
    problem: str


@dataclass(frozen=True)
class BoundRow:
    """For one bound the schedule of each kind that keeps it with the most requests per second."""

    bound_s: float
    points: tuple[LatencyPoint, ...]

    def of(self, kind: ScheduleKind) -> LatencyPoint | None:
        return next((each for each in self.points if each.schedule.kind == kind), None)

    @property
    def best(self) -> LatencyPoint:
        return max(self.points, key=lambda each: each.requests_per_s)


@dataclass(frozen=True)
class KindFronts:
    """The fronts of all kinds that can be had: `points`, and the kinds that cannot."""

    points: tuple[LatencyPoint, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def kinds(self) -> tuple[ScheduleKind, ...]:
        return tuple(dict.fromkeys(each.schedule.kind for each in self.points))

    def front(self, kind: ScheduleKind) -> list[LatencyPoint]:
        """The points of a kind, the tightest bound first."""
        own = (each for each in self.points if each.schedule.kind == kind)
        return sorted(own, key=lambda each: each.bound_s)

    @property
    def rows(self) -> list[BoundRow]:
        """The bounds from which on the best schedule has more throughput, ascending."""
        rows: list[BoundRow] = []
        for bound_s in sorted({each.bound_s for each in self.points}):
            fronts = ([p for p in self.front(kind) if p.bound_s <= bound_s] for kind in self.kinds)
            row = BoundRow(bound_s, tuple(kept[-1] for kept in fronts if kept))
            if not rows or row.best.requests_per_s > rows[-1].best.requests_per_s:
                rows.append(row)
        return rows

    @property
    def runs(self) -> list[list[BoundRow]]:
        return [list(run) for _, run in groupby(self.rows, key=lambda row: row.best.schedule.kind)]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def kind_fronts(
    cluster: ClusterSpec, shape: ModelShape, request: BoundRequest, options: PlanOptions
) -> KindFronts:
    """The fronts of the kinds asked for, each with its own time limit; raises where no kind can be
    had.
    """
    points: list[LatencyPoint] = []
    errors: dict[ScheduleKind, InfeasibleError] = {}
    for kind in request.kinds:
        own = replace(request, kinds=(kind,))
        try:
            points += latency_front(cluster, shape, own, options)
        except InfeasibleError as error:
            errors[kind] = error
    if not points:
        raise next(iter(errors.values()))
    left_out = (LeftOut(kind, error.problem) for kind, error in errors.items())
    return KindFronts(tuple(points), tuple(left_out))


def reason_of(run: Sequence[BoundRow]) -> str:
    """What the best kind of these rows has that the next best of the last one has not."""
    row = run[-1]
    best = row.best.schedule
    others = [each for each in row.points if each.schedule.kind != best.kind]
    if not others:
        return "the only one that keeps the bound"
    other = max(others, key=lambda each: each.requests_per_s).schedule
    if best.divides and not other.divides:
        return (
            f"its decode steps wait for no prefill, where {other.kind.upper()} prefills "
            f"{other.prefill_requests:,} requests after every {other.decode_steps:,} steps"
        )
    more = f"{best.decode_requests:,} requests decode at a time, {other.decode_requests:,} with"
    if best.decode_requests > other.decode_requests:
        room = "one copy of the layers leaves room: " if other.divides != best.divides else ""
        return f"{room}{more} {other.kind.upper()}"
    if not best.divides:
        return f"all devices serve either phase, where {other.kind.upper()} has some for each alone"
    return (
        f"its sides take more equally long than those of {other.kind.upper()}, "
        f"with {best.decode_requests:,} requests that decode at a time"
    )
