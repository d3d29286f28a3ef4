"""Layers of several kinds: every method against trying everything, and against each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from planner.optimiser.assignment import evaluate, smallest_assignment
from planner.optimiser.boxes import stage_lister
from planner.optimiser.boxes.kind_options import unbeaten
from planner.optimiser.feasibility import explain_infeasible, is_feasible
from planner.optimiser.names import Objective
from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.relaxation import relax
from planner.optimiser.sensitivity_tables import LossTables
from quant.common.errors import SpecError
from tests.planner.problems import (
    PRECISION,
    Shape,
    brute_force,
    cluster_problem,
    feasible_problems,
    of_kinds,
    small_uneven_problem,
    solve,
)

OBJECTIVES: tuple[Objective, ...] = ("pipeline", "paper", "job")


def test_what_fits_agrees_with_trying_everything() -> None:
    problems = [small_uneven_problem(seed, "pipeline") for seed in range(80)]
    feasible = [is_feasible(problem) for problem in problems]
    assert feasible == [bool(np.isfinite(brute_force(problem))) for problem in problems]
    assert min(feasible.count(True), feasible.count(False)) > 15, "cases of both sorts"
    for problem, fits in zip(problems, feasible, strict=True):
        assert (explain_infeasible(problem, ["d"] * problem.stages) == "") == fits


@pytest.mark.parametrize("count", [6, pytest.param(40, marks=pytest.mark.rare)])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_method_agrees_with_trying_everything(objective: Objective, count: int) -> None:
    for problem in feasible_problems(count, objective, small_uneven_problem):
        least = brute_force(problem)
        relaxed = relax(problem)
        assert relaxed.bound <= least * (1 + 1e-12)
        assert least <= smallest_assignment(problem).objective * (1 + PRECISION) < np.inf
        for method in ("auto", "ilp"):
            found = solve(problem, method, relative_gap=0)
            assert found.status == "optimal"
            assert found.objective == pytest.approx(least, rel=PRECISION), problem
            assert found.bound == pytest.approx(least, rel=PRECISION), problem
            assert evaluate(problem, found.first_layer, found.bitwidth) == found.objective
        begin, moved = solve(problem, "adabits"), solve(problem, "transfer")
        assert least * (1 - PRECISION) <= moved.objective <= begin.objective
        assert evaluate(problem, moved.first_layer, moved.bitwidth) == moved.objective


FOURTH_IS_OTHER = (0, 0, 0, 1)
MIXER_AND_EXPERTS = (0, 2, 0, 2, 0, 2, 1, 2)


def large_problem(devices: tuple[str, ...], layers: int, objective: Objective) -> AssignmentProblem:
    hidden = 7168 if len(devices) > 3 else 5120
    shape = Shape(devices, layers, hidden, memory_factor=0.6, objective=objective)
    return of_kinds(cluster_problem(shape, 2), (FOURTH_IS_OTHER * layers)[:layers], 2)


def test_boxes_agree_with_the_programme_on_a_pattern() -> None:
    """Three layers of a kind to one of another, as models with linear attention have them."""
    problem = large_problem(("P100", "T4", "V100"), 48, "pipeline")
    found, programme = solve(problem), solve(problem, "ilp")
    assert found.status == programme.status == "optimal"
    assert found.objective == pytest.approx(programme.objective, rel=1e-4)
    assert found.objective - found.bound <= 1.01e-4 * found.objective


def test_transfer_nears_the_optimum_of_a_pattern() -> None:
    problem = large_problem(("T4", "P100", "V100", "V100", "A100"), 40, "pipeline")
    found, begin, moved = (solve(problem, each) for each in ("auto", "adabits", "transfer"))
    assert begin.objective > 1.2 * found.objective
    assert found.bound <= moved.objective < 1.05 * found.objective


@pytest.mark.rare
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    ("devices", "layers"),
    [
        (("T4", "V100"), 48),
        (("V100", "A100"), 64),
        (("P100", "T4", "V100"), 48),
        (("T4", "T4", "V100", "A100"), 48),
        (("T4", "P100", "V100", "V100", "A100"), 64),
    ],
)
def test_boxes_agree_with_the_programme_on_large_problems(
    devices: tuple[str, ...], layers: int, objective: Objective
) -> None:
    problem = large_problem(devices, layers, objective)
    found, programme = solve(problem), solve(problem, "ilp")
    assert found.objective == pytest.approx(programme.objective, rel=1e-4)
    assert found.objective - found.bound <= 1.01e-4 * found.objective


def test_two_parts_of_each_layer_have_bits_of_their_own_on_one_stage() -> None:
    """Mixers of two kinds, each joined by its experts."""
    layers = 24
    shape = Shape(("T4", "V100", "A100"), 2 * layers, 3600, memory_factor=0.6)
    pattern = (MIXER_AND_EXPERTS * layers)[: 2 * layers]
    problem = of_kinds(cluster_problem(shape, 2), pattern, 2, range(1, 2 * layers, 2))
    found, programme = solve(problem), solve(problem, "ilp")
    assert found.objective == pytest.approx(programme.objective, rel=1e-4)
    assert all(boundary % 2 == 0 for boundary in found.first_layer)
    bits = np.array(found.bitwidth).reshape(layers, 2)
    assert (bits[:, 0] != bits[:, 1]).any()


def test_layers_joined_up_to_an_end_are_in_the_bound() -> None:
    """Half of the layers lie on the last stage, as those do that read one layer's keys."""
    problem = large_problem(("T4", "V100", "T4"), 24, "pipeline")
    problem = replace(problem, joined=tuple(range(13, 24)))
    found, programme = solve(problem), solve(problem, "ilp")
    assert found.objective == pytest.approx(programme.objective, rel=1e-4)
    assert found.first_layer[2] <= 12
    freer = solve(replace(problem, joined=()))
    assert 1.2 * freer.objective < 0.99 * found.objective < relax(problem).bound


def test_too_many_options_are_left_to_the_programme(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = large_problem(("T4", "V100"), 24, "pipeline")
    expected = solve(problem, relative_gap=PRECISION)
    monkeypatch.setattr(stage_lister, "MOST_JOINED", 10)
    found = solve(problem, relative_gap=PRECISION)
    assert found.objective == pytest.approx(expected.objective, rel=2 * PRECISION)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind_of_layer": np.array([0, 1])}, r"kind_of_layer has shape \[2\]; give \[4\]"),
        ({"kind_of_layer": np.array([0, 1, 2, 0])}, "whole numbers from 0 to 1"),
        ({"joined": (4,)}, "give some of 1 to 3"),
        ({"joined": (0, 2)}, "give some of 1 to 3"),
        ({"decode_s": np.ones((2, 4))}, r"decode_s has shape \[2, 4\]; give \[2, 8\]"),
    ],
)
def test_kinds_that_make_no_sense_are_refused(change: dict[str, object], message: str) -> None:
    problem = of_kinds(cluster_problem(Shape(("T4", "V100"), 4, 1024), 0), (0, 1, 0, 1), 0)
    with pytest.raises(SpecError, match=message):
        replace(problem, **change)


def test_sizes_of_a_bitwidth_are_those_of_every_kind() -> None:
    problem = of_kinds(cluster_problem(Shape(("T4", "V100"), 4, 1024), 0), (0, 1, 0, 1), 0)
    same = replace(problem, layer_bytes=[4.0, 5.0, 6.0, 7.0], available=[True, True, False, True])
    assert same.layer_bytes.tolist() == [[4.0, 5.0, 6.0, 7.0] * 2] * 2
    assert same.available.tolist() == [[True, True, False, True] * 2] * 2


def test_a_layer_that_no_device_runs_is_named() -> None:
    problem = of_kinds(cluster_problem(Shape(("T4", "V100"), 4, 1024), 0), (0, 0, 1, 0), 0)
    lacking = replace(problem, available=[True] * 4 + [False] * 4)
    assert "no device can run layer 2" in explain_infeasible(lacking, ["T4", "V100"])


def test_an_even_partition_keeps_joined_layers_together() -> None:
    problem = cluster_problem(Shape(("V100", "V100", "V100"), 9, 1024), 0)
    joined = replace(problem, joined=(3, 6, 7))
    first_layer = solve(joined, "uniform").first_layer
    assert first_layer == (0, 2, 5, 9)
    until_the_end = replace(problem, joined=tuple(range(3, 9)))
    assert solve(until_the_end, "uniform").first_layer == (0, 2, 2, 9)


def test_losses_of_a_run_are_those_of_its_layers_matched_kind_by_kind() -> None:
    """Sensitivities by kind, with a bitwidth that is there twice."""
    rng = np.random.default_rng(3)
    omega = np.repeat(-np.sort(-rng.random((7, 3)), axis=1), [1, 2, 1], axis=1)
    problem = of_kinds(cluster_problem(Shape(("T4",), 7, 1024), 0), (0, 1, 1, 0, 0, 1, 0), 0)
    problem = replace(problem, bitwidths=(3, 4, 4, 8), sensitivity=omega)
    counts = np.array([[1, 0, 1, 0, 1, 1, 0, 0], [0, 1, 0, 1, 0, 1, 1, 0]])  # of layers 2 to 5
    found = LossTables(problem).least(2, counts)
    for row, least in zip(counts, found, strict=True):
        total = 0.0
        for layers, own in (([3, 4], row[:4]), ([2, 5], row[4:])):
            cost = omega[layers][:, np.repeat(np.arange(4), own)]
            total += cost[linear_sum_assignment(cost)].sum()
        assert least == pytest.approx(total)


def test_options_that_another_beats_are_left_out_but_one_of_equals() -> None:
    """Costs in few steps, so that many are equal, against all comparisons."""
    rng = np.random.default_rng(0)
    costs = tuple(rng.integers(0, 6, 900).astype(float) for _ in range(3))
    run = np.repeat([4, 7, 9], [500, 30, 370])
    kept = unbeaten(costs, sum(costs), run)
    table = np.column_stack(costs)
    for one in range(3):
        own = table[run == [4, 7, 9][one]]
        left = table[kept[run[kept] == [4, 7, 9][one]]]
        assert all((left <= option).all(axis=1).any() for option in own)
    assert kept.size < 200
    assert (np.diff(kept) > 0).all()
