"""The three qualities: what their rules promise, at any scale of sensitivities and seconds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.builder import Solution
from planner.quality.sensitivity import default_sensitivity
from planner.search import tradeoffs
from planner.search.costs import cost_model
from planner.search.tradeoffs.bounded import PointSolver
from planner.search.tradeoffs.pareto import Point
from planner.search.tradeoffs.qualities import SLOWER, Qualities, chosen_by_quality
from planner.workload import Workload
from quant.common.errors import InfeasibleError, SpecError

NEAR = 2e-4  # accepted gaps of both plans that are compared


def costs_of(scale: float = 1.0, tokens: float = 1.0) -> CostModel:
    """OPT-30B on T4 and V100, so that bits have to be given up."""
    shape, options = (
        model_shape("opt-30b"),
        PlanOptions(group=4, head="last", keep_all_devices=True),
    )
    cluster = ClusterSpec.from_counts(["T4-16GB", "V100-SXM2-32GB"], [2, 1])
    omega = default_sensitivity(shape, options.bits) * np.linspace(3, 0.5, shape.layers)[:, None]
    workload = Workload(8, 128, round(32 * tokens))
    return cost_model(cluster, shape, workload, options, scale * omega)


@cache
def qualities(scale: float = 1.0, tokens: float = 1.0) -> Qualities:
    return chosen_by_quality(costs_of(scale, tokens), "high", lambda: 0.0).qualities


@pytest.mark.parametrize(("scale", "tokens"), [(1.0, 1.0), (1000.0, 1.0), (1.0, 3.0)])
def test_each_quality_keeps_its_rule(scale: float, tokens: float) -> None:
    found = qualities(scale, tokens)
    fast, balanced, high = (found[name] for name in ("fast", "balanced", "high"))
    assert fast.predicted_s <= balanced.predicted_s * (1 + NEAR)
    assert balanced.predicted_s <= high.predicted_s * (1 + NEAR)
    assert fast.omega >= balanced.omega >= high.omega
    assert high.predicted_s <= fast.predicted_s / (1 - SLOWER)


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


def test_no_quality_is_beaten_by_the_plan_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search near known plans finds by chance what the prediction ranks above all others."""
    best = (5.0, 0.1)  # seconds, sensitivity

    def solver(costs: CostModel, *_: object, **__: object) -> PointSolver:
        def solve(theta: float, *, quick: bool = False) -> Point[Solution]:
            if costs.only_bits is not None:
                raise InfeasibleError("sixteen bits do not fit")
            seconds, omega = best if quick else (6.0, 1.0)
            plan = cast(Solution, SimpleNamespace(workload=costs.workload))
            return Point(theta, 1.0, omega, 1.0, plan, seconds)

        return solve

    monkeypatch.setattr(tradeoffs.qualities, "theta_solver", solver)
    found = chosen_by_quality(costs_of(), "high", lambda: 0.0).qualities
    assert {(point.predicted_s, point.omega) for point in found.values()} == {best}


def test_a_batch_has_the_plan_of_high_quality_only_if_that_is_wanted() -> None:
    found = chosen_by_quality(costs_of(), "balanced", lambda: 0.0).qualities
    assert set(found) == {"fast", "balanced"}
    assert found["balanced"].omega == qualities()["balanced"].omega
