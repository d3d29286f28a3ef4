"""Plans under a bound on the latency of requests, with a forecast as the planner fills it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from llmpq import Cluster, Workload
from planner.latency_bound.bounded_plan import KindFronts, LatencyPoint, LeftOut
from planner.lengths import LengthDistribution, RequestLengths
from planner.plan.parts import LatencyForecast
from planner.plan.spec import PlanSpec, Role
from planner.scheduling import BOUNDED, PolicyOptions, RequestSchedule, ScheduleKind
from planner.workload import MicroBatches

LENGTHS = RequestLengths(
    LengthDistribution((100, 300), (0.5, 0.5)), LengthDistribution((10, 30, 50), (0.25, 0.5, 0.25))
)
"""200 prompt tokens and 30 new ones in the mean; 350 at most."""

IN_FLIGHT = 44


def forecast(bound_s: float | None = 20.0) -> LatencyForecast:
    """5.25 requests a second, of which 99 % take at most 18.2 s."""
    return LatencyForecast(
        lengths=LENGTHS,
        quantile=0.99,
        bound_s=bound_s,
        requests_per_s=5.25,
        tokens_per_s=157.5,
        latency_s=18.2,
        mean_latency_s=9.1,
        admission_wait_s=1.3,
        evaluations=417,
    )


@cache
def _plain(devices: tuple[str, ...], counts: tuple[int, ...]) -> PlanSpec:
    cluster = Cluster.from_counts(devices, counts)
    workload = Workload(IN_FLIGHT, 300, 50)
    options = {"theta": 1.0, "keep_all_devices": True, "search_time_limit": 600.0, "group": 6}
    options["bits"] = (3, 4, 16)
    return cluster.plan("opt-1.3b", workload, **options).spec  # type: ignore[arg-type]


def schedule(kind: ScheduleKind, prefill_requests: int, decode_steps: int) -> RequestSchedule:
    """A schedule of 40 requests that decode in two groups, with newcomers two at a time."""
    return RequestSchedule(kind, prefill_requests, 40, decode_steps, 2, 2, LENGTHS.prompts.mean)


def point(bound_s: float, kind: ScheduleKind, requests_per_s: float, of: int) -> LatencyPoint:
    """A schedule of `of` requests that decode, which takes nine tenths of its bound."""
    prefilled, steps = (6, 4) if kind == "rra" else (4, 1)
    own = replace(schedule(kind, prefilled, steps), decode_requests=of)
    return LatencyPoint(bound_s, own, requests_per_s, 30 * requests_per_s, 0.9 * bound_s, 8.0)


FRONTS = KindFronts(
    (
        point(4.0, "rra", 2.2, 20),
        point(20.0, "rra", 6.2, 60),
        point(60.0, "rra", 9.1, 90),
        point(2.0, "waa-c", 1.5, 12),
        point(5.0, "waa-c", 2.6, 16),
        point(23.0, "waa-c", 4.2, 30),
    ),
    (LeftOut("waa-m", "two copies need 3.1 GiB more"),),
)
"""Two kinds of schedule, of which one is best up to 20 s, and one that cannot be had."""


def rra_plan(bound_s: float | None = 20.0) -> PlanSpec:
    """Three stages that prefill 6 newcomers in turns, and then make 4 decode steps."""
    plan = _plain(("T4", "V100-SXM2-32GB"), (2, 1))
    return replace(
        plan,
        micro_batches=MicroBatches(2, 22),
        policy=PolicyOptions(BOUNDED, schedule=schedule("rra", 6, 4)),
        latency=forecast(bound_s),
        baselines=(),
    )


def waa_plan(kind: ScheduleKind = "waa-c", bound_s: float | None = 20.0) -> PlanSpec:
    """A stage on an A100 that prefills for two others that decode."""
    decodes = _with_role(_plain(("T4", "V100-SXM2-32GB"), (1, 1)), "decode")
    prefills = replace(
        _with_role(_plain(("A100-SXM4-40GB",), (1,)), "prefill"),
        workload=Workload(4, 300, 1),
        micro_batches=MicroBatches(2, 1),
        baselines=(),
    )
    stage = replace(prefills.stages[0], device="node9/A100-SXM4-40GB:0")
    return replace(
        decodes,
        micro_batches=MicroBatches(2, 22),
        policy=PolicyOptions(BOUNDED, schedule=schedule(kind, 4, 1)),
        latency=forecast(bound_s),
        prefill_plan=replace(prefills, stages=(stage,)),
        baselines=(),
    )


def _with_role(plan: PlanSpec, role: Role) -> PlanSpec:
    return replace(plan, stages=tuple(replace(stage, role=role) for stage in plan.stages))
