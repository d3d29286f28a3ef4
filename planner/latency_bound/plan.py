"""The plan of a schedule: its stages, the schedule itself, and what it should reach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.costs.model import CostModel
from planner.latency_bound.placing.job import cycle_of, most_in_group
from planner.latency_bound.placing.kind_search import Scheduled
from planner.latency_bound.placing.placement import Placement
from planner.latency_bound.placing.waa import prompts_in_flight
from planner.latency_bound.request import BoundRequest
from planner.micro_batches import MicroBatches
from planner.optimiser.problem import JobPasses
from planner.plan.builder import build_plan
from planner.plan.latency_forecast import LatencyForecast
from planner.plan.spec import PlanSpec, Role, StagePlan
from planner.scheduling import BOUNDED, PolicyOptions, RequestSchedule
from planner.simulation.forecast import Forecast
from planner.workload import Job


def bounded_plan(
    scheduled: Scheduled, costs: CostModel, request: BoundRequest, source: str, omega_source: str
) -> PlanSpec:
    """The plan of a schedule for the model at `source`; `costs` are those that were searched, of
    all devices.
    """
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
    placement: Placement, plan: PlanSpec, schedule: RequestSchedule, costs: CostModel
) -> PlanSpec:
    """The plan of the stages that prefill for those of `plan`: a batch of all that they have in
    flight.
    """
    assert costs.job is not None, "schedules are planned for a job"
    sizes = MicroBatches(schedule.prefill_micro_batch, 1)
    workload = prompts_in_flight(schedule, len(placement.devices), costs.job)
    placed = replace(placement.costs, cluster=costs.cluster, job=None, cycle=None)
    solution = replace(placement.solution, workload=workload, sizes=sizes)
    return build_plan(placed, plan.model.source, solution, plan.sensitivity_source)


def _divided(plan: PlanSpec, prefills: PlanSpec) -> PlanSpec:
    """`plan`, whose stages decode what those of `prefills` have prefilled."""
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
    """What a schedule should reach."""
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


def _forecast(placement: Placement, passes: JobPasses, seconds: float, job: Job) -> Forecast:
    """The forecast of the whole job: its passes keep each stage busy for so long."""
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
