from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from planner.optimiser.assignment import (
    evaluate,
    stage_times,
)
from planner.optimiser.feasibility import explain_infeasible, fullest_bytes, is_feasible
from planner.optimiser.problem import AssignmentProblem, JobPasses
from planner.optimiser.solve import even_sizes
from quant.common.errors import InfeasibleError, SpecError
from tests.planner.problems import Shape, brute_force, cluster_problem, small_problem, solve


@pytest.fixture
def problem() -> AssignmentProblem:
    """Two stages, three layers, 4 and 16 bit, with numbers that can be added by hand."""
    return AssignmentProblem(
        prefill_s=[[1.0, 2.0], [3.0, 4.0]],
        decode_s=[[0.1, 0.2], [0.3, 0.4]],
        fixed_prefill_s=[0.5, 0.25],
        fixed_decode_s=[0.05, 0.5],
        prefill_comm_s=[10.0, 0.0],
        decode_comm_s=[0.02, 0.01],
        layer_bytes=[4.0, 16.0],
        memory_bytes=[20.0, 16.0],
        sensitivity=[[3.0, 0.0], [2.0, 0.0], [1.0, 0.0]],
        theta=2.0,
        bitwidths=(4, 16),
        prefill_micro_batches=3,
        decode_micro_batches=2,
        new_tokens=11,
    )


# Layers 0 and 1 (16 and 4 bit) on stage 0, layer 2 (4 bit) on stage 1:
# prefill 3.5 and 3.25 s, decode 0.35 and 0.8 s, omega 3.


def test_pipeline_objective_by_hand(problem: AssignmentProblem) -> None:
    expected = 2 * 10.0 + (3.5 + 3.25 + 10.0) + 10 * (2 * 0.8) + 2.0 * 3.0
    assert evaluate(problem, [0, 2, 3], [1, 0, 0]) == pytest.approx(expected)


def test_a_single_micro_batch_waits_for_its_token_to_come_round(problem: AssignmentProblem) -> None:
    single = replace(problem, decode_micro_batches=1)
    expected = 2 * 10.0 + 16.75 + 10 * (0.35 + 0.8 + 0.03) + 6.0
    assert evaluate(single, [0, 2, 3], [1, 0, 0]) == pytest.approx(expected)


def test_paper_objective_by_hand(problem: AssignmentProblem) -> None:
    paper = replace(problem, objective="paper")
    expected = 2 * 10.0 + 1 * 10 * 0.8 + 6.75 + 1.15 + 6.0
    assert evaluate(paper, [0, 2, 3], [1, 0, 0]) == pytest.approx(expected)


def test_job_objective_by_hand(problem: AssignmentProblem) -> None:
    """7 prefills in 2.5 bursts, 30 decode steps of which each group makes 12."""
    job = replace(problem, objective="job", passes=JobPasses(7.0, 2.5, 30.0, 12.0, 4.0, 5.0))
    expected = 4.5 * 10.0 + 2.5 * (3.5 + 3.25 + 10.0) + 30 * 0.8 + 6.0
    assert evaluate(job, [0, 2, 3], [1, 0, 0]) == pytest.approx(expected)
    alone = replace(job, passes=JobPasses(7.0, 2.5, 12.0, 12.0, 4.0, 5.0))
    expected += 12 * (0.35 + 0.8 + 0.03) - 30 * 0.8
    assert evaluate(alone, [0, 2, 3], [1, 0, 0]) == pytest.approx(expected)


def test_stage_times_by_hand(problem: AssignmentProblem) -> None:
    times = stage_times(problem, [0, 2, 3], [1, 0, 0])
    assert times.prefill_s == pytest.approx([3.5, 3.25])
    assert times.decode_s == pytest.approx([0.35, 0.8])
    assert times.bytes.tolist() == [20.0, 4.0]
    assert times.quality == 3.0
    assert times.latency_s + 2.0 * times.quality == evaluate(problem, [0, 2, 3], [1, 0, 0])


def test_objective_is_infinite_where_a_plan_cannot_run(problem: AssignmentProblem) -> None:
    without_16 = replace(problem, available=[[True, False], [True, True]])
    assert evaluate(problem, [0, 2, 3], [1, 1, 0]) == np.inf  # 32 of 20 bytes
    assert evaluate(without_16, [0, 2, 3], [1, 0, 0]) == np.inf
    assert evaluate(problem, [0, 3, 3], [0, 0, 0]) == np.inf  # nothing on the last stage


@pytest.mark.parametrize(
    ("first_layer", "bitwidth"),
    [([0, 3], [0, 0, 0]), ([0, 2, 2], [0, 0, 0]), ([0, 4, 3], [0, 0, 0]), ([0, 2, 3], [0, 2, 0])],
)
def test_a_malformed_assignment_is_refused(
    problem: AssignmentProblem, first_layer: list[int], bitwidth: list[int]
) -> None:
    with pytest.raises(SpecError):
        evaluate(problem, first_layer, bitwidth)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decode_s": [[0.1, 0.2]]}, r"decode_s has shape \[1, 2\]; give \[2, 2\]"),
        ({"prefill_s": [[1.0, np.nan], [3.0, 4.0]]}, "prefill_s holds nan"),
        ({"prefill_comm_s": [-1.0, 0.0]}, "at least 0"),
        ({"layer_bytes": [4.0, 5.0, 6.0]}, "layer_bytes has shape"),
        ({"sensitivity": np.zeros((0, 2))}, "at least one stage and layer"),
        ({"theta": -1.0}, "theta is -1"),
        ({"bitwidths": (16, 4)}, "ascending"),
        ({"new_tokens": 0}, "new_tokens is 0"),
        ({"objective": "speed"}, "choose one of pipeline, paper"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused(
    problem: AssignmentProblem, change: dict[str, object], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        replace(problem, **change)


def test_arrays_are_copied_and_read_only(problem: AssignmentProblem) -> None:
    assert problem.layer_bytes.tolist() == [[4.0, 16.0], [4.0, 16.0]]
    with pytest.raises(ValueError, match="read-only"):
        problem.prefill_s[0, 0] = 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "auto, ilp, transfer, adabits, uniform, pipeedge"),
        ({"solver": "abacus"}, "highs, gurobi, cbc"),
        ({"relative_gap": -0.1}, "relative gap"),
        ({"time_limit_s": 0.0}, "time limit"),
    ],
)
def test_unknown_options_are_refused(
    problem: AssignmentProblem, options: dict[str, object], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        solve(problem, **options)


def test_feasibility_in_closed_form_agrees_with_trying_everything() -> None:
    problems = [small_problem(seed, "pipeline") for seed in range(60)]
    feasible = [is_feasible(problem) for problem in problems]
    assert feasible == [bool(np.isfinite(brute_force(problem))) for problem in problems]
    assert min(feasible.count(True), feasible.count(False)) > 10, "cases of both sorts"
    for problem, fits in zip(problems, feasible, strict=True):
        assert (explain_infeasible(problem, ["d"] * problem.stages) == "") == fits


@pytest.mark.parametrize("seed", range(4))
def test_the_fullest_stage_agrees_with_trying_all_counts(seed: int) -> None:
    problem = small_problem(seed, "pipeline")
    for stage in range(problem.stages):
        sizes = problem.layer_bytes[stage, problem.available[stage]].tolist()
        counts = itertools.product(range(problem.layers + 1), repeat=len(sizes))
        sums = (sum(n * size for n, size in zip(row, sizes, strict=True)) for row in counts)
        expected = max(total for total in sums if total <= problem.memory_bytes[stage])
        assert fullest_bytes(problem, stage) == expected


def test_infeasible_memory_is_named_with_its_shortfall(problem: AssignmentProblem) -> None:
    gib = 2.0**30
    large = replace(problem, layer_bytes=[4 * gib, 16 * gib], memory_bytes=[7 * gib, 6 * gib])
    message = explain_infeasible(large, ["T4", "V100"])
    assert "3 layers need 12.00 GiB" in message
    assert "(4 bit)" in message
    assert "offer 13.00 GiB, which is whole layers for 2: short by 1 of them or 4.00 GiB" in message
    assert "12.5 % smaller" in message  # two layers of 3.5 GiB fit 7 GiB
    with pytest.raises(InfeasibleError, match=r"12\.00 GiB"):
        solve(large)


def test_a_stage_too_small_for_one_layer_is_named(problem: AssignmentProblem) -> None:
    gib = 2.0**30
    large = replace(problem, layer_bytes=[4 * gib, 16 * gib], memory_bytes=[20 * gib, gib])
    assert "V100 has 1.00 GiB left, 3.00 GiB short" in explain_infeasible(large, ["T4", "V100"])
    negative = replace(large, memory_bytes=[-2 * gib, 20 * gib])
    assert "stage 0 on T4 is 2.00 GiB short" in explain_infeasible(negative, ["T4", "V100"])


def test_one_layer_cannot_fill_two_stages(problem: AssignmentProblem) -> None:
    single = replace(problem, sensitivity=[[1.0, 0.0]])
    with pytest.raises(InfeasibleError, match="use 1 device"):
        solve(single)
    with pytest.raises(InfeasibleError, match="use 1 device"):
        solve(single, method="uniform")


@pytest.mark.parametrize(("layers", "stages"), [(2, 2), (2, 3), (3, 8), (7, 4), (48, 4)])
def test_even_sizes_differ_by_at_most_one_and_fill_the_ends(layers: int, stages: int) -> None:
    sizes = even_sizes(layers, stages)
    assert sizes.sum() == layers
    assert sizes.max() - sizes.min() <= 1
    assert min(sizes[0], sizes[-1]) >= 1


def test_uniform_takes_the_greatest_bitwidth_that_fits_everywhere() -> None:
    shape = Shape(("T4", "T4", "V100"), layers=30, hidden=5120, memory_factor=0.45)
    problem = cluster_problem(shape, seed=3)
    assignment = solve(problem, method="uniform")
    fitting = [
        choice
        for choice in range(4)
        if (problem.layer_bytes[:, choice] * 10 <= problem.memory_bytes).all()
    ]
    assert assignment.status == "uniform"
    assert assignment.first_layer == (0, 10, 20, 30)
    assert set(assignment.bitwidth) == {max(fitting)}
    assert max(fitting) < 3, "the case must need fewer than 16 bit"
    best = solve(problem, relative_gap=1e-3)
    assert assignment.bound <= best.objective < assignment.objective


def test_uniform_names_the_stage_that_is_short() -> None:
    problem = cluster_problem(Shape(("P100", "A100"), layers=48, hidden=7168), seed=0)
    with pytest.raises(InfeasibleError, match=r"3 bit everywhere .* 24 layers on stage 0"):
        solve(problem, method="uniform")


def test_uniform_needs_a_bitwidth_that_all_devices_run(problem: AssignmentProblem) -> None:
    split = replace(problem, available=[[True, False], [False, True]])
    with pytest.raises(InfeasibleError, match="runs on every device"):
        solve(split, method="uniform")
