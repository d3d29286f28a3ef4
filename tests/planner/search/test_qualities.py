"""The three qualities: what their rules promise, at any scale of sensitivities and seconds."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.fleet.planning import FleetRequest, find_fleet
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.profiles.sensitivity import default_sensitivity
from planner.search.find import find_plan
from planner.search.pareto import ThetaPoint
from planner.search.qualities import (
    SLOWER,
    Qualities,
    best_by_rules,
    chosen_by_quality,
)
from planner.search.request import cost_model
from planner.workload import Job, Workload
from quant.common.errors import InfeasibleError, SpecError
from quant.scheme import NEAR_FULL_BITS
from tests.planner.plan_alone import alone
from tests.planner.problems import FOUR_BITS

NEAR = 2e-4  # accepted gaps of both plans that are compared


def costs_of(scale: float = 1.0, tokens: float = 1.0) -> CostModel:
    """OPT-30B on T4 and V100, so that bits have to be given up."""
    shape, options = (
        model_shape("opt-30b"),
        PlanOptions(bits=FOUR_BITS, group=4, head="last", keep_all_devices=True),
    )
    cluster = ClusterSpec.from_counts(["T4-16GB", "V100-SXM2-32GB"], [2, 1])
    omega = default_sensitivity(shape, options.bits) * np.linspace(3, 0.5, shape.layers)[:, None]
    workload = Workload(4, 128, round(32 * tokens))
    return cost_model(cluster, shape, workload, options, scale * omega)


@cache
def qualities(scale: float = 1.0, tokens: float = 1.0) -> Qualities:
    return chosen_by_quality(costs_of(scale, tokens), "high", lambda: 0.0).qualities


@pytest.mark.parametrize(
    ("scale", "tokens"),
    [(1.0, 1.0), pytest.param(1000.0, 1.0, marks=pytest.mark.rare), (1.0, 3.0)],
)
def test_each_quality_keeps_its_rule(scale: float, tokens: float) -> None:
    found = qualities(scale, tokens)
    fast, balanced, high = (found[name] for name in ("fast", "balanced", "high"))
    assert fast.predicted_s <= balanced.predicted_s * (1 + NEAR)
    assert balanced.predicted_s <= high.predicted_s * (1 + NEAR)
    assert fast.omega >= balanced.omega >= high.omega
    costs = costs_of(scale, tokens)
    near = chosen_by_quality(replace(costs, usable_bits=(8, 16)), "fast", lambda: 0.0)
    limit_s = near.qualities["fast"].predicted_s / (1 - SLOWER)
    assert high.predicted_s <= limit_s * (1 + NEAR)


def test_the_scale_of_sensitivities_changes_nothing() -> None:
    one, other = qualities(), qualities(scale=1000.0)
    assert one["fast"].omega > one["high"].omega, "the case must have a choice"
    for name in one:
        assert other[name].predicted_s == pytest.approx(one[name].predicted_s, rel=1e-3)
        assert other[name].omega == pytest.approx(1000 * one[name].omega, rel=1e-3)


def test_the_plan_of_a_quality_is_one_of_the_three() -> None:
    costs = costs_of()
    chosen = chosen_by_quality(costs, "high", lambda: 0.0)
    point = chosen.qualities["high"]
    assert (chosen.quality, chosen.costs.theta) == ("high", point.theta)
    assert chosen.solution == point.plan
    without = replace(costs, sensitivity=np.zeros_like(costs.sensitivity))
    assert (
        len(
            {
                point.plan
                for point in chosen_by_quality(without, "fast", lambda: 0.0).qualities.values()
            }
        )
        == 1
    )


@pytest.mark.parametrize(
    "other", [{"theta": 1.0}, {"max_omega": 1.0}, {"max_latency_s": 1.0}, {"method": "uniform"}]
)
def test_quality_is_refused_beside_what_decides(other: dict[str, object]) -> None:
    with pytest.raises(SpecError, match="quality has no effect beside"):
        PlanOptions.of({"quality": "high", **other})


def test_no_quality_is_beaten_by_the_plan_of_another() -> None:
    """The search near known plans finds by chance what the prediction ranks above all others."""
    fast, chance = (
        ThetaPoint(1.0, 1.0, omega, 1.0, None, s) for s, omega in ((6.0, 1.0), (5.0, 0.1))
    )
    for found in ([fast, chance], [chance]):
        assert set(best_by_rules(fast, found).values()) == {chance}


FOUR_T4, TWO_T4 = {"T4-16GB": 4}, {"T4-16GB": 2}
BATCH, JOB = Workload(16, 512, 100), Job.of(60, 512, 100)


def planned(
    model: str, devices: dict[str, int], workload: Workload | Job, **options: Any
) -> PlanSpec:
    """The plan alone."""
    with alone():
        return with_others(model, devices, workload, **options)


def with_others(
    model: str, devices: dict[str, int], workload: Workload | Job, **options: Any
) -> PlanSpec:
    """The plan and those beside it."""
    cluster = ClusterSpec.from_counts(list(devices), list(devices.values()))
    asked = PlanOptions(group=8, head="last", keep_all_devices=True, **options)
    return find_plan(cluster, model_shape(model), model, workload, asked).plan


def least_bits(plan: PlanSpec) -> int:
    return min(bits for stage in plan.stages for bits in stage.bitwidths)


def fits(model: str, devices: dict[str, int], workload: Workload | Job, *bits: int) -> bool:
    """Whether a plan that may have no other bits is found."""
    try:
        return bool(planned(model, devices, workload, bits=bits, theta=0.0))
    except InfeasibleError:
        return False


@pytest.mark.parametrize(
    ("model", "devices", "workload", "least"),
    [
        ("qwen2.5-14b", FOUR_T4, BATCH, 8),
        pytest.param("opt-13b", {"V100-SXM2-32GB": 1}, JOB, 8, marks=pytest.mark.rare),
        ("opt-30b", TWO_T4, Workload(8, 128, 32), 4),
        ("opt-30b", {"V100-SXM2-16GB": 1}, Workload(1, 64, 8), 3),
    ],
)
def test_layers_have_no_fewer_bits_than_memory_forces(
    model: str, devices: dict[str, int], workload: Workload | Job, least: int
) -> None:
    floors = [each for each in (8, 4, 3) if fits(model, devices, workload, each, 16)]
    assert floors[0] == least, "the case is what it should be"
    plan = with_others(model, devices, workload)
    assert least_bits(plan) >= least
    assert {each.quality for each in plan.beside.qualities} == {"high", "balanced", "fast"}
    assert plan.quality is not None
    assert (plan.quality.perplexity_ratio < 1.005) == (least == NEAR_FULL_BITS)


@pytest.mark.parametrize("options", [{"quality": "fast"}, {"theta": 0.0}, {"bits": (3, 4)}])
def test_who_asks_for_fewer_bits_has_them(options: dict[str, Any]) -> None:
    assert least_bits(planned("qwen2.5-14b", FOUR_T4, BATCH, **options)) < NEAR_FULL_BITS


def test_the_qualities_of_a_batch_are_the_best_of_their_bits() -> None:
    """Against plans of 8 and 16 bit only, at thetas of a wide range."""
    plan = with_others("qwen2.5-14b", FOUR_T4, BATCH)
    high, balanced, fast = (each.plan for each in plan.beside.qualities)
    assert fast.tokens_per_s >= balanced.tokens_per_s >= high.tokens_per_s
    found = [
        planned("qwen2.5-14b", FOUR_T4, BATCH, bits=(8, 16), theta=theta)
        for theta in (0.01, 10.0, 1e3, 3e3, 1e5)
    ]
    fastest = max(each.predicted.tokens_per_s for each in found)
    assert balanced.tokens_per_s == pytest.approx(fastest, rel=1e-3)
    near = [each for each in found if each.predicted.tokens_per_s >= (1 - SLOWER) * fastest]
    assert high.sensitivity <= min(each.solver.sensitivity for each in near)
    assert high.tokens_per_s >= (1 - SLOWER) * fastest


def test_a_fleet_keeps_the_same_rule() -> None:
    cluster = ClusterSpec.from_counts(["T4-16GB"], [4])
    job, shape = Job.of(100, 512, 100), model_shape("qwen2.5-14b")
    options = PlanOptions(search_time_limit=600.0, group=8, quality="high")
    fleet = find_fleet(FleetRequest(cluster, shape, "qwen2.5-14b", job, options), time.process_time)
    assert min(map(least_bits, fleet.replicas)) >= NEAR_FULL_BITS
