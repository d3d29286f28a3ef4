"""The plans beside a plan, against planning what they stand for by itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from planner.cluster.spec import ClusterSpec
from planner.lengths import Lengths
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.parts import PlanChoice
from planner.plan.spec import PlanSpec
from planner.search.find import find_plan
from planner.workload import Job, Workload
from tests.planner.plan_alone import alone

SHAPE = replace(model_shape("opt-125m"), layers=4)
JOB = Job(40, Lengths((40, 200, 90, 20), (8, 30, 14, 60)))
SOLVED_TO = 0.03  # the gap of answers, and what the simulation says of plans beside each other
QUICK_TO = 0.07  # numbers in flight five percent apart, and the gap of answers
BITS = (4, 8, 16)


def cluster(t4: int = 1, v100: int = 1, gib: float = 0.74) -> ClusterSpec:
    """T4 and V100 on two nodes, with so little memory that bits are given up for slots."""
    kinds = ("a", "T4", t4), ("b", "V100-32GB", v100)
    nodes = [
        {"name": name, "accelerators": {kind: count}, "usable_memory_gib": gib}
        for name, kind, count in kinds
    ]
    network = {"internode_gbit_per_s": 10}
    return ClusterSpec.from_dict({"name": "small", "nodes": nodes, "network": network})


def planned(where: ClusterSpec, work: Job | Workload, **options: Any) -> PlanSpec:
    options = {"bits": BITS, "head_bits": (16,), "search_time_limit": 600.0} | options
    return find_plan(where, SHAPE, "opt-125m", work, PlanOptions(**options)).plan


def planned_alone(where: ClusterSpec, work: Job | Workload, **options: Any) -> PlanChoice:
    with alone():
        return own_choice(planned(where, work, **options))


@cache
def job_plan() -> PlanSpec:
    return planned(cluster(), JOB)


def own_choice(plan: PlanSpec) -> PlanChoice:
    bits = [each for stage in plan.stages for each in stage.bitwidths]
    in_flight, rate = plan.workload.global_batch, plan.predicted.tokens_per_s
    return PlanChoice(in_flight, rate, plan.solver.sensitivity, sum(bits) / len(bits))


def cost_s(choice: PlanChoice, theta: float) -> float:
    """Seconds of the job, and what its sensitivity is worth."""
    return JOB.output_tokens / choice.tokens_per_s + theta * choice.sensitivity


def test_the_curve_has_the_best_plans_of_its_numbers() -> None:
    """Its micro-batches follow one rule and none is simulated, so that it may be a little off."""
    plan = job_plan()
    assert plan.beside is not None
    curve, theta = plan.beside.curve, plan.solver.theta
    numbers = [each.in_flight for each in curve]
    assert numbers == sorted(set(numbers))
    assert len(numbers) > 3
    assert plan.workload.global_batch not in numbers
    each = curve[1]
    options = {"in_flight": each.in_flight, "theta": theta, "keep_all_devices": True}
    best_s = cost_s(planned_alone(cluster(), JOB, **options), theta)
    assert best_s * 0.9 <= cost_s(each, theta) <= best_s * 1.15


@pytest.mark.parametrize(("number", "more"), [(0, {"t4": 2}), (1, {"v100": 2})])
def test_one_more_device_brings_what_planning_with_it_brings(
    number: int, more: dict[str, int]
) -> None:
    plan = job_plan()
    assert plan.beside is not None
    theta, answer = plan.solver.theta, plan.beside.more_devices[number]
    grown = planned_alone(cluster(**more), JOB, theta=theta, keep_all_devices=True)
    assert answer.count == 1
    assert answer.accelerator == ("T4-16GB", "V100-SXM2-32GB")[number]
    found_s, best_s = cost_s(answer.plan, theta), cost_s(grown, theta)
    assert best_s * (1 - SOLVED_TO) <= found_s <= best_s * (1 + QUICK_TO)
    assert found_s < cost_s(own_choice(plan), theta) * (1 - SOLVED_TO)


def test_one_more_device_never_costs_throughput() -> None:
    """With more memory the V100 is fastest alone, and a T4 more would only be in its way."""
    plan = planned(cluster(gib=1.0), JOB)
    assert len(plan.stages) == 1
    assert plan.beside is not None
    assert plan.beside.more_devices[0].plan == own_choice(plan)
    assert plan.beside.more_devices[1].plan.tokens_per_s >= plan.predicted.tokens_per_s


def test_full_precision_has_a_theta_that_gives_it_again() -> None:
    roomy = cluster(gib=0.79)
    plan = planned(roomy, JOB)
    assert plan.beside is not None
    high = next(each for each in plan.beside.qualities if each.quality == "high")
    assert high.plan.mean_bits == 16.0, "the case must have full precision as its best quality"
    assert plan.solver.sensitivity > 0
    again = planned_alone(roomy, JOB, theta=high.theta)
    assert again.sensitivity == 0
    assert again.tokens_per_s == pytest.approx(high.plan.tokens_per_s, rel=SOLVED_TO)


def test_a_batch_for_which_bits_fall_is_beaten_by_a_smaller_one() -> None:
    where = cluster(gib=0.76)
    batch = planned(where, Workload(32, 400, 20), theta=0.01)
    assert batch.beside is not None
    beaten_by, own = batch.beside.beaten_by, own_choice(batch)
    assert beaten_by is not None
    assert beaten_by.in_flight < 32
    assert beaten_by.tokens_per_s > own.tokens_per_s
    assert beaten_by.sensitivity < own.sensitivity
    theta = 0.01 * beaten_by.in_flight / 32
    smaller = planned_alone(where, Workload(beaten_by.in_flight, 400, 20), theta=theta)
    assert smaller.tokens_per_s == pytest.approx(beaten_by.tokens_per_s, rel=SOLVED_TO)
    assert smaller.sensitivity == pytest.approx(beaten_by.sensitivity, rel=SOLVED_TO)


def test_a_batch_with_room_is_beaten_by_none() -> None:
    """Larger batches share more passes over the weights; at 16 bit none can be better either."""
    few_bits = planned(cluster(), Workload(16, 200, 60), theta=0.0)
    assert few_bits.solver.sensitivity > 0
    all_bits = planned(cluster(gib=4.0), Workload(16, 200, 60), theta=100.0)
    assert all_bits.solver.sensitivity == 0
    for plan in (few_bits, all_bits):
        assert plan.beside is not None
        assert plan.beside.beaten_by is None


WIDE = replace(model_shape("opt-6.7b"), layers=4)
BATCH = Workload(4, 100, 30)


def on_two(work: Job | Workload, gib: float = 8.0, **options: Any) -> PlanSpec:
    """A plan of wide layers for two V100 of one node, by speed alone."""
    node = {"name": "a", "accelerators": {"V100-32GB": 2}, "usable_memory_gib": gib}
    where = ClusterSpec.from_dict({"name": "two", "nodes": [node]})
    chosen = PlanOptions(**{"bits": BITS, "search_time_limit": 600.0, "theta": 0.0} | options)
    return find_plan(where, WIDE, "opt-6.7b", work, chosen).plan


@pytest.mark.parametrize("work", [JOB, BATCH], ids=["job", "batch"])
def test_groups_bring_what_planning_with_them_brings(work: Job | Workload) -> None:
    with alone():
        grouped = own_choice(on_two(work, tensor_parallel="auto"))
    plan = on_two(work)
    told = plan.beside.grouped
    assert grouped.tokens_per_s > 1.1 * own_choice(plan).tokens_per_s, "groups must be faster here"
    assert told is not None
    assert told.tokens_per_s == pytest.approx(grouped.tokens_per_s, rel=QUICK_TO)


def test_groups_are_not_told_of_where_there_are_none_or_they_were_tried() -> None:
    assert planned(cluster(), Workload(16, 200, 30), theta=0.0).beside.grouped is None
    assert on_two(BATCH, tensor_parallel="auto").beside.grouped is None
