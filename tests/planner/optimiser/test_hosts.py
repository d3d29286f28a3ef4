"""Layers that may lie in the memory of hosts: every method against trying everything."""

from __future__ import annotations

import numpy as np
import pytest

from planner.optimiser.assignment import evaluate, smallest_assignment, stage_times
from planner.optimiser.feasibility import explain_infeasible, is_feasible
from planner.optimiser.names import Objective
from planner.optimiser.relaxation import relax
from tests.planner.problems import (
    PRECISION,
    brute_force,
    feasible_problems,
    small_hosted_problem,
    solve,
)

OBJECTIVES: tuple[Objective, ...] = ("pipeline", "paper", "job")


def test_what_fits_agrees_with_trying_everything() -> None:
    problems = [small_hosted_problem(seed, "pipeline") for seed in range(60)]
    feasible = [is_feasible(problem) for problem in problems]
    assert feasible == [bool(np.isfinite(brute_force(problem))) for problem in problems]
    assert min(feasible.count(True), feasible.count(False)) > 10, "cases of both sorts"
    for problem, fits in zip(problems, feasible, strict=True):
        assert (explain_infeasible(problem, ["d"] * problem.stages) == "") == fits


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_method_agrees_with_trying_everything(objective: Objective) -> None:
    hosted = 0
    for problem in feasible_problems(10, objective, small_hosted_problem):
        least = brute_force(problem)
        assert relax(problem).bound <= least * (1 + 1e-12)
        assert least <= smallest_assignment(problem).objective * (1 + PRECISION) < np.inf
        for method in ("auto", "ilp"):
            found = solve(problem, method, relative_gap=0)
            assert found.status == "optimal"
            assert found.objective == pytest.approx(least, rel=PRECISION), problem
            assert found.bound == pytest.approx(least, rel=PRECISION), problem
            assert evaluate(problem, found.first_layer, found.bitwidth) == found.objective
        begin, moved = solve(problem, "adabits"), solve(problem, "transfer")
        assert least * (1 - PRECISION) <= moved.objective <= begin.objective
        hosted += stage_times(problem, found.first_layer, found.bitwidth).host_bytes.any()
    assert hosted > 1
