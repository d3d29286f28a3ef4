"""The plan of a schedule: its stages, the schedule itself, and what it should reach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.latency_bound.job import cycle_of, most_in_flight, most_in_group
from planner.latency_bound.placing.alternation import Scheduled
from planner.latency_bound.placing.placement import Placement
from planner.latency_bound.request import BoundRequest
from planner.latency_bound.timeline import Timeline
from planner.micro_batches import MicroBatches
from planner.optimiser.problem import JobPasses
from planner.plan.builder import build_plan
from planner.plan.latency_forecast import LatencyForecast
from planner.plan.spec import PlanSpec
from planner.scheduling import BOUNDED, PolicyOptions
from planner.simulation.forecast import Forecast
from planner.workload import Job


def bounded_plan(
    scheduled: Scheduled, job: Job, request: BoundRequest, source: str, omega_source: str
) -> PlanSpec:
    """The plan of a schedule for the model at `source`, without what was searched for it."""
    schedule, placement = scheduled.schedule, scheduled.placed.placements[0]
    sizes = MicroBatches(schedule.prefill_micro_batch, most_in_group(schedule))
    costs = replace(placement.costs, cycle=cycle_of(schedule, job))
    workload = costs.in_flight(job, most_in_flight(schedule))
    solution = replace(placement.solution, workload=workload, sizes=sizes)
    passes = costs.cycle.passes(sizes) if costs.cycle else None
    assert passes is not None, "a schedule has a cycle"
    forecast = _forecast(placement, passes, scheduled.seconds, job)
    plan = build_plan(costs, source, solution, omega_source, forecast=forecast)
    return replace(plan, policy=PolicyOptions(BOUNDED, schedule=schedule))


def latency_forecast(
    timeline: Timeline, request: BoundRequest, evaluations: int
) -> LatencyForecast:
    """What a schedule should reach."""
    rate = timeline.performance.requests_per_s
    return LatencyForecast(
        lengths=request.lengths,
        quantile=request.quantile,
        bound_s=request.bound_s,
        requests_per_s=rate,
        tokens_per_s=rate * request.lengths.outputs.mean,
        latency_s=timeline.performance.latency_s,
        mean_latency_s=timeline.mean_latency_s,
        admission_wait_s=timeline.admission_wait_s,
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
