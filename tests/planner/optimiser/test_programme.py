from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pulp
import pytest

from planner.optimiser.assignment import (
    SolveOptions,
    assign_bits,
    evaluate,
    smallest_assignment,
)
from planner.optimiser.feasibility import fullest_bytes
from planner.optimiser.milp import BoundaryRelaxation, solve_exactly
from planner.optimiser.names import DEFAULT_SOLVER, Objective
from planner.optimiser.relaxation import lower_bound
from planner.optimiser.solvers import SOLVERS
from quant.common.errors import InfeasibleError, SpecError
from tests.planner import problems
from tests.planner.problems import (
    PRECISION,
    Shape,
    brute_force,
    check_cutoff,
    cluster_problem,
    feasible_problems,
)

OBJECTIVES: tuple[Objective, ...] = ("pipeline", "paper", "job")
INSTALLED = [
    name
    for name, solver in SOLVERS.items()
    if name != DEFAULT_SOLVER and solver.create(0.0, None).available()
]
solve = partial(problems.solve, method="ilp")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_ilp_agrees_with_trying_everything(objective: Objective) -> None:
    for problem in feasible_problems(10, objective):
        least = brute_force(problem)
        found = solve(problem, relative_gap=0)
        assert found.status == "optimal"
        assert found.objective == pytest.approx(least, rel=PRECISION), problem
        assert evaluate(problem, found.first_layer, found.bitwidth) == found.objective
        assert found.bound == pytest.approx(least, rel=PRECISION), problem
        assert lower_bound(problem) <= least * (1 + PRECISION)
        assert least <= smallest_assignment(problem).objective * (1 + PRECISION) < np.inf


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_upper_bound_cuts_off_exactly_what_cannot_beat_it(objective: Objective) -> None:
    for problem in feasible_problems(10, objective):
        check_cutoff(solve, problem)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("theta", [0.1, 10.0])
def test_a_gap_holds_on_problems_of_real_size(theta: float, objective: Objective) -> None:
    """The bound of one run never exceeds what another run, to a finer gap, finds."""
    shape = Shape(("P100", "T4", "V100"), 40, 5120, theta=theta, objective=objective)
    problem = cluster_problem(shape, seed=5)
    coarse = solve(problem, relative_gap=1e-2)
    fine = solve(problem, relative_gap=1e-4)
    assert coarse.objective <= fine.objective * (1 + 1e-2)
    assert coarse.bound <= fine.objective
    assert fine.objective - fine.bound <= 1.01e-4 * fine.objective
    assert lower_bound(problem) <= fine.objective


def test_windows_keep_every_plan_as_good_as_the_cutoff() -> None:
    """The optimum's boundaries lie inside the windows of any cutoff above it."""
    problem = cluster_problem(Shape(("T4", "T4", "V100"), 24, 5120), seed=2)
    best = solve(problem, relative_gap=1e-6)
    relaxation = BoundaryRelaxation(problem)
    for factor in (1.0, 1.01, 1.5):
        windows = relaxation.windows_within(best.objective * factor)
        assert windows is not None
        inner = best.first_layer[1:-1]
        assert all(low <= cut <= high for (low, high), cut in zip(windows, inner, strict=True))
    assert relaxation.windows_within(lower_bound(problem) * 0.99) is None


def test_recovery_gives_the_bits_to_the_layers_that_need_them() -> None:
    """With the sensitivity a product of layer and bitwidth, more bits go to the greater factor."""
    problem = cluster_problem(Shape(("A100",), 6, 1024, bitwidths=(4, 8, 16)), seed=0)
    factor = np.array([3.0, 1.0, 6.0, 2.0, 5.0, 4.0])
    product = replace(problem, sensitivity=np.outer(factor, [1.0, 0.1, 0.0]))
    candidate = assign_bits(product, np.array([[2, 3, 1]]))
    assert candidate.bitwidth == (1, 0, 2, 0, 1, 1)


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_units_of_time_do_not_matter(factor: float) -> None:
    problem = cluster_problem(Shape(("T4", "V100"), 12, 4096), seed=4)
    times = ("prefill_s", "decode_s", "fixed_prefill_s", "fixed_decode_s")
    comm = ("prefill_comm_s", "decode_comm_s")
    scaled = replace(
        problem,
        theta=problem.theta * factor,
        **{name: getattr(problem, name) * factor for name in times + comm},
    )
    found, other = solve(problem, relative_gap=1e-7), solve(scaled, relative_gap=1e-7)
    assert other.objective == pytest.approx(found.objective * factor, rel=1e-6)


def test_memory_that_is_filled_to_the_byte_is_used() -> None:
    problem = cluster_problem(Shape(("T4", "T4"), 10, 4096, bitwidths=(16,)), seed=1)
    exact = replace(problem, memory_bytes=problem.layer_bytes[:, 0] * [3, 7])
    assert solve(exact).first_layer == (0, 3, 10)
    short = replace(exact, memory_bytes=exact.memory_bytes - [0, 1])
    with pytest.raises(InfeasibleError, match="short by 1 of them"):
        solve(short)


def test_a_point_that_only_tolerance_allows_is_not_returned() -> None:
    """One stage is a billionth short of the layers it would take if it could."""
    problem = cluster_problem(Shape(("A100", "T4"), 10, 4096, bitwidths=(16,), theta=0.0), seed=1)
    roomy = replace(problem, memory_bytes=[1e12, 1e12])
    wanted = solve(roomy).first_layer[1]
    limit = wanted * problem.layer_bytes[0, 0] * (1 - 1e-11)
    tight = replace(roomy, memory_bytes=[limit, 1e12])
    assert fullest_bytes(tight, 0) == (wanted - 1) * problem.layer_bytes[0, 0]
    found = solve(tight)
    assert found.first_layer[1] == wanted - 1
    assert found.status == "optimal"


def test_middle_stages_may_stay_empty() -> None:
    problem = cluster_problem(Shape(("A100", "P100", "A100"), 2, 2048), seed=0)
    assert solve(problem).first_layer == (0, 1, 1, 2)


def test_a_time_limit_returns_the_best_plan_so_far() -> None:
    ticks: Iterator[float] = iter(range(10_000))
    shape = Shape(("V100",) * 3 + ("A100",) * 3, 60, 8192)
    problem = cluster_problem(shape, seed=1)
    options = SolveOptions(time_limit_s=1e-3, relative_gap=1e-9, clock=lambda: float(next(ticks)))
    found = solve_exactly(problem, options)
    assert found.status == "time_limit"
    assert evaluate(problem, found.first_layer, found.bitwidth) == found.objective
    assert found.bound < found.objective


@pytest.mark.parametrize("solver", INSTALLED)
def test_every_solver_agrees_with_highs(solver: str) -> None:
    """On problems that Gurobi's free licence takes."""
    shape = Shape(("T4", "V100"), 12, 5120, memory_factor=0.4)
    for problem in (cluster_problem(shape, seed=6), *feasible_problems(6, "paper")):
        highs = solve(problem, relative_gap=0)
        other = solve(problem, solver=solver, relative_gap=0)
        assert other.objective == pytest.approx(highs.objective, rel=PRECISION)
        assert other.status == "optimal"


def test_a_missing_solver_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp.GUROBI, "available", lambda self: False)
    problem = cluster_problem(Shape(("T4", "V100"), 12, 4096), seed=6)
    with pytest.raises(SpecError, match="install gurobipy and a licence, or use 'highs'"):
        solve(problem, solver="gurobi")
