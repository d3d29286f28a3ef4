"""The seconds that a plan carries for emulated devices, against the simulation and closed forms."""

from __future__ import annotations

import json
from dataclasses import replace
from math import sin
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.costs.pass_times import OccupiedStages, PassTable
from planner.costs.roofline import RooflineLatency
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.modelled_times import LengthCurve, ModelledTimes, modelled_times
from planner.plan.spec import PlanSpec
from planner.profiles.fit import FittedLatency
from planner.profiles.layer_terms import LayerTerms
from planner.profiles.rows import ProfileRow
from planner.profiles.sensitivity import default_sensitivity
from planner.schedule.passes import JobRows
from planner.schedule.static import JobSchedule
from planner.scheduling import Phase
from planner.search.baselines import baselines
from planner.search.request import PlanningRequest
from planner.search.request import costs_of as costs_of_request
from planner.workload import MicroBatches, Workload
from quant.common.errors import InfeasibleError, SpecError
from tests.planner.edits import content_of
from tests.planner.plan_alone import find_plan
from tests.planner.problems import FOUR_BITS

SHAPE = model_shape("opt-30b")
WORKLOAD = Workload(global_batch=11, prompt_length=90, new_tokens=23)
SIZES = MicroBatches(prefill=3, decode=4)
NODES = [
    {"name": "a", "accelerators": {"T4-16GB": 1, "V100-SXM2-32GB": 1}},
    {"name": "b", "accelerators": {"A100-SXM4-40GB": 1}},
]
NETWORK = {"internode_gbit_per_s": 10}
QUICK = PlanOptions(
    bits=(8, 16),
    dtype="float16",
    theta=10.0,
    head="last",
    keep_all_devices=True,
    prefill_micro_batch=3,
    decode_micro_batch=4,
)


def cluster_of(emulate: dict[str, object] | None) -> ClusterSpec:
    values: dict[str, object] = {"name": "mixed", "nodes": NODES, "network": NETWORK}
    return ClusterSpec.from_dict(values if emulate is None else {**values, "emulate": emulate})


def rows(device: str) -> tuple[ProfileRow, ...]:
    """Times that no line describes, at enough workloads for a correction."""
    layer = LayerTerms.of(SHAPE)
    return tuple(
        ProfileRow(device, "opt-30b", layer, 4 * 7168, phase, 8, batch, length, length, seconds)
        for phase in ("prefill", "decode")
        for batch in (1, 3, 8)
        for length in (16, 64, 128, 256)
        for seconds in [1e-3 * (batch + length / 50 + sin(batch * length))]
    )


def costs_of(head_on_first: bool, profiled: bool) -> CostModel:
    roofline = RooflineLatency(SHAPE)
    latency = FittedLatency(rows("V100-SXM2-32GB"), roofline) if profiled else roofline
    options = PlanOptions(dtype="float16", bits=FOUR_BITS)
    omega = default_sensitivity(SHAPE, options.bits)
    cluster = cluster_of({"time_scale": 0.1, "stand_in": "small"})
    return CostModel(cluster, SHAPE, WORKLOAD, options, latency, omega, head_on_first=head_on_first)


@pytest.mark.parametrize("profiled", [False, True])
@pytest.mark.parametrize("head_on_first", [False, True])
def test_passes_of_the_planned_batch_take_what_they_take_in_the_simulation(
    head_on_first: bool, profiled: bool
) -> None:
    costs = costs_of(head_on_first, profiled)
    stages = OccupiedStages(costs.cluster.devices, (0, 5, 30, 48))
    timing = PassTable(costs, stages, [i % 4 for i in range(48)])
    times = modelled_times(costs, stages.devices, SIZES, timing.compute_s)
    for each in JobSchedule(JobRows.alike(WORKLOAD), WORKLOAD.global_batch, SIZES, 3).passes():
        expected = timing.seconds(each)
        length = each.tokens if each.phase == "prefill" else each.context_length
        lengths = np.full(each.requests, length)
        for j, stage in enumerate(times):
            held_s = stage.compute_s(each.phase == "decode", lengths)
            assert held_s == pytest.approx(expected.compute[j], rel=1e-9)
            sent_s = stage.transfer_s(each.requests * each.tokens, each.requests)
            assert sent_s == pytest.approx(expected.transfer[j], rel=1e-9)


def test_what_is_linear_stays_small_and_other_passes_come_close() -> None:
    def compute(phase: Phase, requests: int, length: int) -> list[float]:
        bent = max(requests * length, 700) + 1e-3 * requests * length**2
        return [1.0 + requests + 2 * length, bent if phase == "prefill" else 5.0 + length]

    costs = costs_of(False, False)
    devices = costs.cluster.devices[:2]
    line, bent = modelled_times(costs, devices, SIZES, compute)
    assert max(len(curve.lengths) for curve in (*line.prefill, *line.decode)) == 2
    for requests in (1, 2, 3):
        for length in range(1, WORKLOAD.total_length):
            lengths = np.full(requests, length)
            expected = compute("prefill", requests, length)
            assert line.compute_s(False, lengths) == pytest.approx(expected[0], rel=1e-9)
            assert bent.compute_s(False, lengths) == pytest.approx(expected[1], rel=0.01)


def test_a_micro_batch_of_unequal_requests_costs_the_sum_of_its_terms() -> None:
    """Terms v, s, vs and a constant: over requests a sum, a mean, and nothing."""
    lengths, grid = np.array([3, 50, 7]), (1, 100)

    def seconds(requests: int, length: float) -> float:
        return 4 + 0.5 * requests + 0.1 * length + 0.2 * requests * length

    curves = tuple(
        LengthCurve(v, grid, tuple(seconds(v, length) for length in grid)) for v in (1, 2, 8)
    )
    times = ModelledTimes(curves, curves)
    expected = 4 + 0.5 * 3 + 0.1 * lengths.mean() + 0.2 * lengths.sum()
    assert times.compute_s(True, lengths) == pytest.approx(expected)
    assert times.compute_s(True, lengths[:1]) == pytest.approx(seconds(1, 3))
    assert ModelledTimes.constant(2.0, 3.0).compute_s(False, lengths) == 2.0
    assert ModelledTimes.constant(2.0, 3.0).compute_s(True, lengths) == 3.0


@pytest.mark.parametrize(
    ("lengths", "seconds"), [((1, 1), (1.0, 2.0)), ((2, 1), (1.0, 2.0)), ((1, 2), (1.0,))]
)
def test_curves_that_are_none_are_refused(
    lengths: tuple[int, ...], seconds: tuple[float, ...]
) -> None:
    with pytest.raises(ValidationError, match="ascending"):
        LengthCurve(1, lengths, seconds)


def test_a_plan_with_a_stand_in_is_that_of_the_real_cluster() -> None:
    emulated, real = (
        find_plan(cluster_of(emulate), SHAPE, "opt-30b", WORKLOAD, QUICK).plan
        for emulate in ({"time_scale": 0.1, "stand_in": "small"}, None)
    )
    assert emulated.stand_in == "small"
    assert emulated.predicted == real.predicted
    for played, stage in zip(emulated.stages, real.stages, strict=True):
        assert played.modelled is not None
        assert stage.modelled is None
        assert played == replace(
            stage, emulated=True, custom_resource=None, modelled=played.modelled
        )
    assert PlanSpec.from_json(emulated.to_json()) == emulated


def test_older_plans_and_those_without_a_time_scale_carry_none() -> None:
    cluster = cluster_of({"time_scale": 0})
    plan = find_plan(cluster, SHAPE, "opt-30b", WORKLOAD, QUICK).plan
    assert plan.stand_in is None
    content = content_of(plan)
    del content["stand_in"]
    for stage in content["stages"]:
        assert stage.pop("modelled") is None
    assert PlanSpec.from_json(json.dumps(content)) == plan


def test_a_bad_table_is_named_by_its_field() -> None:
    plan = find_plan(cluster_of({}), SHAPE, "opt-30b", WORKLOAD, QUICK).plan
    content = content_of(plan)
    content["stages"][0]["modelled"]["decode"][0]["seconds"].append(1.0)
    with pytest.raises(SpecError, match=r"stages\.0\.modelled\.decode\.0.*ascending"):
        PlanSpec.from_json(json.dumps(content))


@pytest.mark.parametrize("method", ["uniform", "pipeedge"])
def test_baselines_make_plans_that_can_be_run(method: str, tmp_path: Path) -> None:
    options = replace(QUICK, method=method, group=2)
    cluster = cluster_of(None)
    plan = find_plan(cluster, SHAPE, "opt-30b", WORKLOAD, options).plan
    costs, _ = costs_of_request(PlanningRequest(cluster, SHAPE, WORKLOAD, options))
    named = {baseline.name: baseline for baseline in baselines(costs)}
    assert plan.predicted.latency_s == pytest.approx(named[method].latency_s)
    assert {bits for stage in plan.stages for bits in stage.bitwidths} == {named[method].bitwidth}
    assert plan.solver.status == method
    plan.save(tmp_path / "plan.json")
    assert PlanSpec.load(tmp_path / "plan.json") == plan


def test_a_baseline_that_does_not_fit_says_so() -> None:
    cluster = ClusterSpec.from_counts(["P100-PCIE-12GB", "A100-SXM4-80GB"], [1, 1])
    options = PlanOptions(method="uniform", bits=(8, 16))
    with pytest.raises(InfeasibleError, match="uniform has no plan"):
        find_plan(cluster, SHAPE, "opt-30b", WORKLOAD, options)
    with pytest.raises(SpecError, match="leave them out"):
        find_plan(cluster_of(None), SHAPE, "opt-30b", WORKLOAD, replace(options, max_omega=1.0))
