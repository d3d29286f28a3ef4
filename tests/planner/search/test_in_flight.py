"""The number in flight of a job, against trying every number, order, head and pair of sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.costs.pass_times import PassTable
from planner.lengths import Lengths
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.profiles.sensitivity import default_sensitivity
from planner.search.baselines import baseline, baseline_solution
from planner.search.candidates import Candidates, SearchCandidate
from planner.search.find import find_plan
from planner.search.in_flight import plan_solver
from planner.search.qualities import chosen_by_quality
from planner.search.request import cost_model
from planner.simulation.job_simulation import forecast_assignment
from planner.workload import Job
from quant.common.errors import DoesNotFitError, SpecError
from tests.planner import plan_alone
from tests.planner.problems import solve

CLUSTER = ClusterSpec.from_counts(["T4", "V100-32GB"], [1, 1])
ONE_PERCENT = 0.01
UNLIKE = Lengths((40, 200, 90, 20), (8, 30, 14, 60))


def costs_of(
    job: Job, counts: list[int], gib: float, layers: int = 4, sensitivity: float = 1.0
) -> CostModel:
    """Some layers of OPT-125M on T4 and V100 with little memory, sensitivities uneven."""
    shape = replace(model_shape("opt-125m"), layers=layers)
    names = ["T4", "V100-32GB"][: len(counts)]
    cluster = ClusterSpec.from_counts(names, counts, internode_gbit_per_s=10)
    devices = tuple(replace(d, memory_bytes=round(gib * 2**30)) for d in cluster.devices)
    options = PlanOptions(bits=(4, 8, 16), relative_gap=1e-4)
    omega = default_sensitivity(shape, options.bits) * np.linspace(3, 0.5, layers)[:, None]
    cluster = replace(cluster, devices=devices)
    costs = cost_model(cluster, shape, job.in_flight(1), options, sensitivity * omega)
    return replace(costs, job=job)


def all_candidates(costs: CostModel, job: Job) -> Iterator[SearchCandidate]:
    """Yield those of every number in flight and every set of devices."""
    for number in range(1, job.prompts + 1):
        for count in range(1, len(costs.cluster.devices) + 1):
            for devices in combinations(costs.cluster.devices, count):
                cluster = replace(costs.cluster, devices=devices)
                here = replace(costs, cluster=cluster, workload=job.in_flight(number))
                with suppress(DoesNotFitError):
                    yield from Candidates(here)


def best_of_all(costs: CostModel, job: Job) -> float:
    """The least objective of all candidates."""
    each = (solve(one.problem, relative_gap=0) for one in all_candidates(costs, job))
    return min((found.objective for found in each), default=math.inf)


@pytest.mark.parametrize(
    ("job", "counts", "gib", "theta"),
    [
        (Job(10, UNLIKE), [1, 1], 0.75, 0.0),
        pytest.param(Job(8, UNLIKE), [1, 1], 1.0, 0.0, marks=pytest.mark.rare),
        (Job.of(8, 128, 32), [1, 1], 0.72, 0.0),
        pytest.param(Job(24, UNLIKE), [1], 0.85, 0.0, marks=pytest.mark.rare),
        (Job(24, UNLIKE), [1], 0.85, 0.05),
    ],
)
def test_the_plan_is_near_the_best_of_all_numbers(
    job: Job, counts: list[int], gib: float, theta: float
) -> None:
    costs = replace(costs_of(job, counts, gib), theta=theta)
    found = plan_solver(costs)(theta)
    best = best_of_all(costs, job)
    assert found.lower_bound <= found.assignment.objective
    assert found.assignment.objective >= best * (1 - 1e-6)
    assert found.assignment.objective <= best * (1 + ONE_PERCENT + found.gap)


def test_no_plan_has_both_more_tokens_per_s_and_less_sensitivity() -> None:
    """Of all candidates, each solved for speed alone, for quality alone and in between."""
    job = Job(5, UNLIKE)
    costs = costs_of(job, [1, 1], 0.85)
    chosen = chosen_by_quality(costs, "balanced", lambda: 0.0)
    point = chosen.qualities["balanced"]
    theta, seen = point.theta, 0
    for one in all_candidates(costs, job):
        for factor in (0.1, 10.0, 1e6):
            here = replace(costs, workload=one.workload, head_on_first=one.head_on_first)
            problem = replace(one.problem, theta=factor * theta)
            found = solve(problem, relative_gap=0)
            omega = problem.sensitivity[np.arange(problem.layers), list(found.bitwidth)].sum()
            if omega < point.omega * (1 - ONE_PERCENT):
                simulated = forecast_assignment(
                    PassTable.of(here, one.devices, found.first_layer, found.bitwidth), one.sizes
                )
                assert simulated.seconds > point.predicted_s * (1 - ONE_PERCENT)
                seen += 1
    assert seen, "some plan must be of better quality"


def planned(job: Job, **options: Any) -> PlanSpec:
    shape = model_shape("opt-125m")
    chosen = PlanOptions.of({"theta": 0.0, **options})
    return plan_alone.find_plan(CLUSTER, shape, "opt-125m", job, chosen).plan


def test_no_more_are_in_flight_than_the_job_has() -> None:
    assert planned(Job.of(3, 128, 16), in_flight=40).workload.global_batch == 3


@pytest.mark.parametrize("name", ["prefill_micro_batch", "decode_micro_batch"])
def test_numbers_in_flight_fill_the_micro_batches_that_are_fixed(name: str) -> None:
    plan = planned(Job.of(12, 128, 16), **{name: 5})
    assert plan.workload.global_batch >= 5
    assert getattr(plan.micro_batches, name.split("_")[0]) == 5
    with pytest.raises(SpecError, match=f"{name} is 5, more than the 4 prompts"):
        planned(Job.of(4, 128, 16), **{name: 5})


@pytest.mark.parametrize("method", ["uniform", "pipeedge"])
def test_a_baseline_has_its_own_best_number_in_flight(method: str) -> None:
    job = Job(12, UNLIKE)
    costs = costs_of(job, [1, 1], 0.9)
    costs = replace(costs, options=replace(costs.options, method=method))
    rates = [
        baseline(replace(costs, workload=job.in_flight(number)), method).tokens_per_s or 0.0
        for number in range(1, job.prompts + 1)
    ]
    found_costs, found = baseline_solution(costs)
    assert found.workload == found_costs.workload
    assert rates[found.workload.global_batch - 1] >= 0.97 * max(rates) > 2 * rates[0]


def test_a_device_that_does_not_help_is_not_said_to_harm() -> None:
    """One prompt is fastest on one device, which another can only keep waiting."""
    plan = find_plan(
        CLUSTER, model_shape("opt-125m"), "opt-125m", Job.of(1, 128, 16), PlanOptions()
    ).plan
    assert len(plan.stages) == 1
    more = plan.beside.more_devices
    assert len(more) == 2
    for each in more:
        assert each.plan.tokens_per_s >= plan.predicted.tokens_per_s * (1 - 1e-9)
