from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from planner.optimiser.assignment import evaluate, stage_times
from planner.optimiser.names import BATCH_OBJECTIVES, Objective
from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.solve import estimate_offloading
from quant.common.errors import InfeasibleError, SpecError
from tests.planner.problems import Shape, cluster_problem, feasible_problems, small_problem, solve

OBJECTIVES: tuple[Objective, ...] = ("pipeline", "paper", "job")
TWO_PERCENT = 0.02


def all_plans(problem: AssignmentProblem) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every plan that fits."""
    stages, layers = problem.stages, problem.layers
    plans = []
    for cuts in itertools.combinations_with_replacement(range(layers + 1), stages - 1):
        for bits in itertools.product(range(len(problem.bitwidths)), repeat=layers):
            if math.isfinite(evaluate(problem, (0, *cuts, layers), bits)):
                plans.append(((0, *cuts, layers), bits))
    return plans


@pytest.mark.parametrize("seed", range(5))
def test_adabits_has_the_least_sensitivity_of_all_plans(seed: int) -> None:
    problem = small_problem(seed, "pipeline")
    plans = all_plans(problem)
    if not plans:
        with pytest.raises(InfeasibleError):
            solve(problem, "adabits")
        return
    least = min(stage_times(problem, *plan).quality for plan in plans)
    found = solve(problem, "adabits", relative_gap=0)
    quality = stage_times(problem, found.first_layer, found.bitwidth).quality
    assert found.status == "adabits"
    assert quality == pytest.approx(least, rel=1e-3, abs=1e-9)
    assert found.objective == evaluate(problem, found.first_layer, found.bitwidth)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_transfer_is_never_worse_than_its_start(objective: Objective) -> None:
    for problem in feasible_problems(6, objective):
        start, found = solve(problem, "adabits"), solve(problem, "transfer")
        assert found.status == "transfer"
        assert found.bound <= found.objective <= start.objective
        assert found.objective == evaluate(problem, found.first_layer, found.bitwidth)


@pytest.mark.parametrize("objective", BATCH_OBJECTIVES)
@pytest.mark.parametrize("devices", [("T4",) * 3 + ("V100",), ("V100",) * 4])
def test_transfer_comes_near_the_optimum(devices: tuple[str, ...], objective: Objective) -> None:
    problem = cluster_problem(Shape(devices, 48, 7168, objective=objective), seed=2)
    best, start = solve(problem).objective, solve(problem, "adabits").objective
    found = solve(problem, "transfer").objective
    assert found <= best * (1 + TWO_PERCENT)
    assert start > best * (1 + TWO_PERCENT), "the case must need transfers"


@pytest.mark.parametrize("seed", range(6))
def test_pipeedge_has_the_fastest_prefill_at_its_bitwidth(seed: int) -> None:
    problem = small_problem(seed, "pipeline")
    of_one_bitwidth = [plan for plan in all_plans(problem) if len(set(plan[1])) == 1]
    if not of_one_bitwidth:
        with pytest.raises(InfeasibleError):
            solve(problem, "pipeedge")
        return
    most = max(bits[0] for _, bits in of_one_bitwidth)
    comm_s = problem.prefill_comm_s.max()
    fastest_s = min(
        max(stage_times(problem, cuts, bits).prefill_s.max(), comm_s)
        for cuts, bits in of_one_bitwidth
        if bits[0] == most
    )
    found = solve(problem, "pipeedge")
    times = stage_times(problem, found.first_layer, found.bitwidth)
    assert found.status == "pipeedge"
    assert set(found.bitwidth) == {most}
    assert max(times.prefill_s.max(), comm_s) == pytest.approx(fastest_s)


@pytest.fixture
def roomy() -> AssignmentProblem:
    """Two equal stages of four layers each, memory for all."""
    problem = cluster_problem(Shape(("T4", "T4"), 8, 4096, bitwidths=(8, 16)), seed=0)
    return replace(problem, memory_bytes=problem.layer_bytes[:, 1] * 8)


def test_offloading_nothing_costs_what_the_uniform_plan_does(roomy: AssignmentProblem) -> None:
    found = estimate_offloading(roomy, 16, [12e9, 12e9], [0.0, 0.0])
    uniform = solve(roomy, "uniform")
    times = stage_times(roomy, uniform.first_layer, uniform.bitwidth)
    assert found.latency_s == pytest.approx(times.latency_s)
    assert found.host_bytes.tolist() == [0.0, 0.0]


def test_streamed_layers_bound_every_round(roomy: AssignmentProblem) -> None:
    """One layer of four does not fit; at a slow link its transfer is all that counts."""
    each = float(roomy.layer_bytes[0, 1])
    short = replace(roomy, memory_bytes=[3 * each, 3 * each], objective="paper")
    slow = estimate_offloading(short, 16, [1e6, 1e6], [each, each])
    streamed_s = each / 1e6
    prefill_s = streamed_s / roomy.prefill_micro_batches
    decode_s = streamed_s / roomy.decode_micro_batches
    expected = (roomy.prefill_micro_batches - 1) * prefill_s + 2 * prefill_s
    expected += (roomy.decode_micro_batches - 1) * 99 * decode_s + 2 * decode_s
    assert slow.latency_s == pytest.approx(expected)
    assert slow.host_bytes.tolist() == [each, each]


def test_offloading_names_what_is_short(roomy: AssignmentProblem) -> None:
    each = float(roomy.layer_bytes[0, 1])
    short = replace(roomy, memory_bytes=[3 * each, 4 * each])
    with pytest.raises(InfeasibleError, match="stage 0 offloads"):
        estimate_offloading(short, 16, [1e9, 1e9], [0.0, 0.0])
    with pytest.raises(SpecError, match="3 bit is none of 8, 16"):
        estimate_offloading(short, 3, [1e9, 1e9], [0.0, 0.0])
    lacking = replace(short, available=np.array([[True, False], [True, True]]))
    with pytest.raises(InfeasibleError, match="stage 0 cannot run 16 bit"):
        estimate_offloading(lacking, 16, [1e9, 1e9], [each, each])
