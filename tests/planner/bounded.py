"""Plans that follow a schedule for a bound on latency."""

from __future__ import annotations

from dataclasses import replace

from planner.lengths import LengthDistribution, RequestLengths
from planner.plan.parts import LatencyForecast
from planner.plan.spec import PlanSpec
from planner.scheduling import PolicyOptions, RequestSchedule

FORECAST = LatencyForecast(
    lengths=RequestLengths(LengthDistribution((64,), (1.0,)), LengthDistribution((8,), (1.0,))),
    quantile=0.99,
    bound_s=20.0,
    requests_per_s=2.0,
    tokens_per_s=16.0,
    latency_s=12.0,
    mean_latency_s=6.0,
    admission_wait_s=3.0,
    evaluations=100,
)


def bounded(plan: PlanSpec, schedule: RequestSchedule, n_slots: int | None = None) -> PlanSpec:
    """`plan` under this schedule, with so many token slots in its KV cache where they are given."""
    workload = plan.workload if n_slots is None else replace(plan.workload, n_slots=n_slots)
    policy, origin = PolicyOptions("exegpt", schedule=schedule), plan.origin
    if origin is not None:
        origin = replace(origin, options=replace(origin.options, policy="exegpt"))
    return replace(plan, policy=policy, workload=workload, latency=FORECAST, origin=origin)
