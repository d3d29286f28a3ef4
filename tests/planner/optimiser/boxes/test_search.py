from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from benchmarks.planning.published import solve_published
from planner.optimiser.assignment import SolveOptions, evaluate
from planner.optimiser.boxes import stage_lister
from planner.optimiser.boxes.search import solve_by_boxes
from planner.optimiser.names import Objective
from planner.optimiser.prices import PricedProblem, Prices, stage_kinds
from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.relaxation import relax
from planner.optimiser.sensitivity_tables import (
    LossTables,
    SensitivityTables,
    lattice_size,
    rank_of_counts,
)
from planner.optimiser.solve import solve_automatically
from tests.planner.problems import (
    PRECISION,
    Shape,
    brute_force,
    check_cutoff,
    cluster_problem,
    feasible_problems,
    solve,
)

OBJECTIVES: tuple[Objective, ...] = ("pipeline", "paper", "job")
MIXED = Shape(("P100", "T4", "T4", "V100"), 24, 7168, memory_factor=0.7)
LARGE = Shape(("V100",) * 3 + ("A100",) * 3, 60, 8192)


def with_random_sensitivity(problem: AssignmentProblem, seed: int) -> AssignmentProblem:
    """Any non-negative matrix that falls with the bitwidth; no product, some entries equal."""
    rng = np.random.default_rng(seed)
    omega = rng.exponential(1.0, problem.sensitivity.shape) / problem.layers
    omega[rng.random(problem.layers) < 0.2] = 0.0
    return replace(problem, sensitivity=-np.sort(-omega, axis=1))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_boxes_agree_with_trying_everything(objective: Objective) -> None:
    for seed, small in enumerate(feasible_problems(16, objective)):
        problem = with_random_sensitivity(small, seed)
        least = brute_force(problem)
        found = solve_by_boxes(problem, SolveOptions(relative_gap=0))
        assert found.status == "optimal"
        assert found.objective == pytest.approx(least, rel=PRECISION), problem
        assert found.bound == pytest.approx(least, rel=PRECISION), problem
        assert evaluate(problem, found.first_layer, found.bitwidth) == found.objective
        assert relax(problem).bound <= least


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_upper_bound_cuts_off_exactly_what_cannot_beat_it(objective: Objective) -> None:
    for problem in feasible_problems(7, objective):
        check_cutoff(solve, problem)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("devices", [("T4", "V100"), ("V100", "P100", "A100")])
def test_boxes_agree_with_the_published_programme(
    devices: tuple[str, ...], objective: Objective
) -> None:
    """LLM-PQ eq. 4-16 as printed, by HiGHS."""
    shape = Shape(devices, 7, 7168, memory_factor=0.3, objective=objective)
    problem = with_random_sensitivity(cluster_problem(shape, 1), 1)
    published = solve_published(problem, None, PRECISION)
    assert published.finished
    found = solve(problem, relative_gap=PRECISION)
    assert found.objective == pytest.approx(published.objective, rel=2 * PRECISION)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("theta", [0.1, 30.0])
def test_boxes_agree_with_the_staircase_programme(theta: float, objective: Objective) -> None:
    shape = replace(MIXED, theta=theta, objective=objective)
    problem = with_random_sensitivity(cluster_problem(shape, seed=8), 8)
    programme = solve(problem, method="ilp", relative_gap=PRECISION)
    found = solve(problem, relative_gap=PRECISION)
    assert found.objective == pytest.approx(programme.objective, rel=2 * PRECISION)
    assert found.objective - found.bound <= 1.1 * PRECISION * found.objective


@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_rounds_and_trips_that_cost_about_the_same(micro_batches: int) -> None:
    """With as many micro-batches as stages either may decide a decode round."""
    shape = Shape(("V100",) * 3, 10, 7168, memory_factor=0.5)
    problem = replace(cluster_problem(shape, seed=3), decode_micro_batches=micro_batches)
    found = solve(problem, relative_gap=1e-7)
    programme = solve(problem, method="ilp", relative_gap=1e-7)
    assert found.objective == pytest.approx(programme.objective, rel=PRECISION)


def test_a_large_cluster_is_solved_to_a_small_gap() -> None:
    names = ("T4",) * 4 + ("P100",) * 4 + ("V100",) * 4 + ("A100",) * 4
    problem = cluster_problem(Shape(names, 80, 8192), seed=1)
    found = solve(problem, relative_gap=1e-4)
    assert found.status == "optimal"
    assert found.objective - found.bound <= 1.01e-4 * found.objective


def ticking() -> Iterator[float]:
    """Seconds of a clock that is a second later each time it is read."""
    yield from (float(tick) for tick in range(10_000))


def test_a_time_limit_returns_the_best_plan_so_far() -> None:
    ticks = ticking()
    problem = cluster_problem(LARGE, seed=1)
    options = SolveOptions(time_limit_s=2.0, relative_gap=1e-9, clock=lambda: next(ticks))
    found = solve_by_boxes(problem, options)
    assert found.status == "time_limit"
    assert evaluate(problem, found.first_layer, found.bitwidth) == found.objective
    assert 0 < found.bound < found.objective
    exact = solve(problem)
    assert found.bound <= exact.objective <= found.objective


def test_transfer_improves_what_a_time_limit_left() -> None:
    problem = cluster_problem(LARGE, seed=1)
    ticks, others = ticking(), ticking()
    hasty = SolveOptions(time_limit_s=4.0, relative_gap=1e-9, clock=lambda: next(ticks))
    left = solve_by_boxes(problem, replace(hasty, time_limit_s=3.2, clock=lambda: next(others)))
    found = solve_automatically(problem, hasty, LossTables(problem))
    assert found.objective <= left.objective
    assert evaluate(problem, found.first_layer, found.bitwidth) == found.objective


def test_too_many_options_are_left_to_the_programme(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cluster_problem(Shape(("T4", "V100"), 12, 5120, memory_factor=0.4), seed=2)
    expected = solve(problem, relative_gap=PRECISION)
    monkeypatch.setattr(stage_lister, "MOST_ENTRIES", 10)
    found = solve(problem, relative_gap=PRECISION)
    assert found.objective == pytest.approx(expected.objective, rel=2 * PRECISION)


@pytest.mark.parametrize("choices", [1, 2, 4])
def test_tables_hold_the_least_sensitivity_of_every_run(choices: int) -> None:
    rng = np.random.default_rng(choices)
    omega = -np.sort(-rng.random((7, choices)), axis=1)
    tables = SensitivityTables(omega)
    for length in range(6):
        counts = tables.counts(length)
        assert len(counts) == lattice_size(length, choices)
        assert (rank_of_counts(counts, length) == np.arange(len(counts))).all()
        for start, found in zip((0, 1), tables.least(length, np.array([0, 1])), strict=True):
            for held, least in zip(counts, found, strict=True):
                cost = omega[start : start + length, np.repeat(np.arange(choices), held)]
                assert least == pytest.approx(cost[linear_sum_assignment(cost)].sum())


def test_equal_layers_share_their_tables() -> None:
    tables = SensitivityTables(np.tile([0.3, 0.1, 0.0], (9, 1)))
    found = tables.least(4, np.array([0, 3, 5]))
    assert found == pytest.approx(np.tile(tables.counts(4) @ [0.3, 0.1, 0.0], (3, 1)))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_any_prices_prove_a_bound(objective: Objective) -> None:
    for seed, problem in enumerate(feasible_problems(7, objective)):
        rng = np.random.default_rng(seed)
        priced = PricedProblem(problem)
        form, count = priced.form, priced.kinds.count
        trip = float(rng.random()) if objective == "pipeline" else 0.0
        shares = [rng.dirichlet(np.ones(count.size + 1))[:-1] / count for _ in range(2)]
        prices = Prices(
            shares[0] * form.prefill_max,
            shares[1] * (1 - trip) * form.decode_max,
            rng.exponential(1e-9, count.size),
            np.zeros(count.size),
            trip,
        )
        assert priced.path_bound(prices).bound <= brute_force(problem) * (1 + 1e-12)


def test_stages_between_the_ends_share_a_kind() -> None:
    problem = cluster_problem(Shape(("T4",) * 4, 8, 4096), seed=0)
    equal = replace(
        problem,
        **{name: getattr(problem, name)[[0, 0, 0, 0]] for name in ("prefill_s", "decode_s")},
    )
    kinds = stage_kinds(equal)
    assert kinds.of_stage.tolist() == [0, 2, 2, 1]
    assert kinds.count.tolist() == [1, 1, 2]
