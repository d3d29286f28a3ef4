from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from benchmarks.published import solve_published
from planner.optimiser.auto import solve_automatically
from planner.optimiser.boxes import method as box_method
from planner.optimiser.boxes.method import relax, solve_by_boxes
from planner.optimiser.boxes.multipliers import PricedProblem, Prices
from planner.optimiser.capacity import is_feasible
from planner.optimiser.problem import AssignmentProblem, stage_times
from planner.optimiser.quality_tables import QualityTables, lattice_size, rank_of_counts
from planner.optimiser.solve import Objective, evaluate, solve
from planner.optimiser.solve_options import SolveOptions
from planner.optimiser.stage_kinds import latency_weights, stage_kinds
from tests.planner.problems import (
    PRECISION,
    Shape,
    brute_force,
    check_cutoff,
    cluster_problem,
    small_problem,
)

OBJECTIVES: tuple[Objective, ...] = ("pipeline", "paper")
MIXED = Shape(("P100", "T4", "T4", "V100"), 24, 7168, memory_factor=0.7)


def with_random_sensitivity(problem: AssignmentProblem, seed: int) -> AssignmentProblem:
    """Any non-negative matrix that falls with the bitwidth; no product, some entries equal."""
    rng = np.random.default_rng(seed)
    omega = rng.exponential(1.0, problem.sensitivity.shape) / problem.layers
    omega[rng.random(problem.layers) < 0.2] = 0.0
    return replace(problem, sensitivity=-np.sort(-omega, axis=1))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(200))
def test_boxes_agree_with_trying_everything(seed: int, objective: Objective) -> None:
    problem = with_random_sensitivity(small_problem(seed, objective), seed)
    if not is_feasible(problem):
        return
    least = brute_force(problem)
    found = solve_by_boxes(problem, SolveOptions(relative_gap=0))
    assert found.status == "optimal"
    assert found.objective == pytest.approx(least, rel=PRECISION)
    assert found.bound == pytest.approx(least, rel=PRECISION)
    assert evaluate(problem, found.first_layer, found.bitwidth) == found.objective
    assert relax(problem).bound <= least


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(60))
def test_an_upper_bound_cuts_off_exactly_what_cannot_beat_it(
    seed: int, objective: Objective
) -> None:
    check_cutoff(solve, small_problem(seed, objective))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("devices", [("T4", "V100"), ("V100", "P100", "A100")])
def test_boxes_agree_with_the_published_programme(
    devices: tuple[str, ...], seed: int, objective: Objective
) -> None:
    """LLM-PQ eq. 4-16 as printed, by HiGHS."""
    shape = Shape(devices, 9, 7168, memory_factor=0.35, objective=objective)
    problem = with_random_sensitivity(cluster_problem(shape, seed), seed)
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


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5])
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


def test_a_time_limit_returns_the_best_plan_so_far() -> None:
    ticks: Iterator[float] = iter(range(10_000))
    problem = cluster_problem(Shape(("V100",) * 3 + ("A100",) * 3, 60, 8192), seed=1)
    options = SolveOptions(time_limit_s=2.0, relative_gap=1e-9, clock=lambda: float(next(ticks)))
    found = solve_by_boxes(problem, options)
    assert found.status == "time_limit"
    assert evaluate(problem, found.first_layer, found.bitwidth) == found.objective
    assert 0 < found.bound < found.objective
    exact = solve(problem)
    assert found.bound <= exact.objective <= found.objective


def test_transfer_improves_what_a_time_limit_left() -> None:
    problem = cluster_problem(Shape(("V100",) * 3 + ("A100",) * 3, 60, 8192), seed=1)

    def clock_of(limit: int) -> Iterator[float]:
        yield from (float(tick) for tick in range(limit))

    ticks, others = clock_of(10_000), clock_of(10_000)
    hasty = SolveOptions(time_limit_s=4.0, relative_gap=1e-9, clock=lambda: next(ticks))
    left = solve_by_boxes(problem, replace(hasty, time_limit_s=3.2, clock=lambda: next(others)))
    found = solve_automatically(problem, hasty)
    assert found.objective <= left.objective
    assert evaluate(problem, found.first_layer, found.bitwidth) == found.objective


def test_too_many_options_are_left_to_the_programme(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cluster_problem(Shape(("T4", "V100"), 12, 5120, memory_factor=0.4), seed=2)
    expected = solve(problem, relative_gap=PRECISION)
    monkeypatch.setattr(box_method, "MOST_ENTRIES", 10)
    found = solve(problem, relative_gap=PRECISION)
    assert [part.phase for part in found.phases] != ["boxes"]
    assert found.objective == pytest.approx(expected.objective, rel=2 * PRECISION)


@pytest.mark.parametrize("choices", [1, 2, 4])
def test_quality_tables_hold_the_least_sensitivity_of_every_run(choices: int) -> None:
    rng = np.random.default_rng(choices)
    omega = -np.sort(-rng.random((7, choices)), axis=1)
    tables = QualityTables(omega)
    for length in range(6):
        counts = tables.counts(length)
        assert len(counts) == lattice_size(length, choices)
        assert (rank_of_counts(counts, length) == np.arange(len(counts))).all()
        for start, found in zip((0, 1), tables.least(length, np.array([0, 1])), strict=True):
            for held, least in zip(counts, found, strict=True):
                cost = omega[start : start + length, np.repeat(np.arange(choices), held)]
                assert least == pytest.approx(cost[linear_sum_assignment(cost)].sum())


def test_equal_layers_share_their_tables() -> None:
    tables = QualityTables(np.tile([0.3, 0.1, 0.0], (9, 1)))
    found = tables.least(4, np.array([0, 3, 5]))
    assert found == pytest.approx(np.tile(tables.counts(4) @ [0.3, 0.1, 0.0], (3, 1)))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(40))
def test_any_prices_prove_a_bound(seed: int, objective: Objective) -> None:
    problem = small_problem(seed, objective)
    if not is_feasible(problem):
        return
    rng = np.random.default_rng(seed)
    priced = PricedProblem(problem)
    weights, count = priced.weights, priced.kinds.count
    trip = float(rng.random()) if objective == "pipeline" else 0.0
    shares = [rng.dirichlet(np.ones(count.size + 1))[:-1] / count for _ in range(2)]
    prices = Prices(
        shares[0] * weights.prefill_max,
        shares[1] * (1 - trip) * weights.decode_max,
        rng.exponential(1e-9, count.size),
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


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_latency_weights_price_as_the_problem_does(objective: Objective) -> None:
    problem = cluster_problem(replace(MIXED, objective=objective), seed=4)
    found = solve(problem)
    times = stage_times(problem, found.first_layer, found.bitwidth)
    seconds = latency_weights(problem).seconds(
        times.prefill_s.max(), times.decode_s.max(), times.prefill_s.sum(), times.decode_s.sum()
    )
    assert seconds == pytest.approx(times.latency_s, rel=1e-12)
