"""Searches with some of many bitwidths, against trying everything and against all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.optimiser.assignment import SolveOptions, evaluate
from planner.optimiser.boxes import few_bitwidths
from planner.optimiser.boxes.search import solve_by_boxes
from planner.optimiser.solve import solve_by
from quant.scheme import BITWIDTHS
from tests.planner.problems import Shape, brute_force, cluster_problem

SHAPE = Shape(("T4", "V100"), 4, 7168, bitwidths=BITWIDTHS)


@pytest.fixture(autouse=True)
def _few_of_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_bitwidths, "MOST_WAYS", 0)


@pytest.mark.parametrize("theta", [0.0, 0.05, 5.0])
def test_what_is_told_holds_for_all_bitwidths(theta: float) -> None:
    """The best of four bitwidths is near that of six, and the bound is below both."""
    proven = 0
    for seed in range(8):
        problem = cluster_problem(replace(SHAPE, theta=theta), seed)
        held = np.sort(problem.layer_bytes.min(axis=0))
        memory = np.array([1.0, 1.1]) * float(np.quantile(held, seed / 8)) * 2
        problem = replace(problem, memory_bytes=memory)
        assert few_bitwidths.has_many(problem)
        least, found = brute_force(problem), solve_by_boxes(problem, SolveOptions(relative_gap=0))
        assert found.bound <= least * (1 + 1e-9)
        assert least * (1 - 1e-9) <= found.objective <= 1.02 * least
        assert evaluate(problem, found.first_layer, found.bitwidth) == found.objective
        if found.status == "optimal":
            assert found.objective == pytest.approx(least, rel=1e-6)
            proven += 1
    assert proven >= 2, "layers are so few that the relaxation is far off"


def test_transfer_is_between_the_same_bitwidths() -> None:
    problem = cluster_problem(replace(SHAPE, theta=0.5), 3)
    exact, found = (solve_by(method, problem, SolveOptions()) for method in ("auto", "transfer"))
    assert found.status == "transfer"
    assert found.bound <= exact.objective * (1 + 1e-9)
    assert exact.objective * (1 - 1e-4) <= found.objective < 1.1 * exact.objective
    assert evaluate(problem, found.first_layer, found.bitwidth) == found.objective


def test_the_smallest_bits_are_there_where_nothing_else_fits() -> None:
    problem = cluster_problem(replace(SHAPE, theta=50.0), 0)
    least = problem.layer_bytes[:, 0]
    problem = replace(problem, memory_bytes=2.001 * least)
    found = solve_by_boxes(problem, SolveOptions())
    assert set(found.bitwidth) == {0}
    nothing = solve_by_boxes(problem, SolveOptions(upper_bound=found.objective))
    assert nothing.status == "cutoff"
    assert nothing.bound <= found.objective
