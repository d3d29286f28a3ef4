"""A plan for a whole job, with a forecast as the planner fills it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from llmpq import Cluster, Workload
from planner.lengths import Lengths
from planner.optimiser.problem import JobPasses
from planner.plan.parts import (
    DivergenceScale,
    JobForecast,
    MoreDevices,
    PlanChoice,
    PlansBeside,
    QualityChoice,
    QualityForecast,
)
from planner.plan.spec import PlanSpec
from planner.workload import Job

HIGH = PlanChoice(80, 281.0, 0.12, 6.8)
BALANCED = PlanChoice(96, 306.0, 0.21, 5.9)
FAST = PlanChoice(104, 310.0, 0.9, 4.4)
CURVE = (
    PlanChoice(32, 178.0, 0.02, 9.0),
    PlanChoice(64, 276.0, 0.1, 7.0),
    BALANCED,
    PlanChoice(128, 275.0, 2.4, 3.3),
)
SCALE = DivergenceScale(((1.0, 0.1),), 2.0, 0.0, "sizes", "default")  # a tenth of the sensitivity
LENGTHS = Lengths((100, 300), (50, 150))  # 200 and 100 in the mean; slots of 450 tokens


@cache
def small_plan() -> PlanSpec:
    """A plan for one short batch."""
    return Cluster.from_counts(["T4"], [1]).plan("opt-125m", Workload(1, 8, 2), theta=1.0).spec


def job_plan() -> PlanSpec:
    """A plan with 96 of 3,000 prompts in flight: 300,000 new tokens in 980 seconds."""
    plan = small_plan()
    job = JobForecast(
        job=Job(3000, LENGTHS),
        seconds=980.0,
        tokens_per_s=306.0,
        passes=JobPasses(125, 60, 3000, 750, 24, 24),
        price_per_hour=3.1,
    )
    beside = PlansBeside(
        quality="balanced",
        qualities=(
            QualityChoice("high", 50.0, HIGH),
            QualityChoice("balanced", 10.0, BALANCED),
            QualityChoice("fast", 0.0, FAST),
        ),
        full_precision=PlanChoice(48, 263.16, 0.0, 16.0),
        curve=CURVE,
        more_devices=(
            MoreDevices("T4-16GB", "a", 1, PlanChoice(128, 370.26, 0.2, 6.0)),
            MoreDevices("V100-SXM2-32GB", "b", 2, PlanChoice(160, 413.1, 0.2, 6.0)),
        ),
    )
    return replace(
        plan,
        stages=tuple(replace(s, bitwidths=(8,) * len(s.layers)) for s in plan.stages),
        workload=replace(plan.workload, global_batch=96, prompt_length=300, new_tokens=150),
        solver=replace(plan.solver, sensitivity=0.21),
        quality=QualityForecast(0.021, 0.0105, 0.042, SCALE),
        predicted=replace(plan.predicted, latency_s=980.0, tokens_per_s=306.0),
        job=job,
        beside=beside,
    )
