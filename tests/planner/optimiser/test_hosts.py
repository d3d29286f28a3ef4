"""Layers that may lie in the memory of hosts: every method against trying everything."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from planner.optimiser.assignment import evaluate, smallest_assignment, stage_times
from planner.optimiser.feasibility import explain_infeasible, is_feasible
from planner.optimiser.names import Objective
from planner.optimiser.problem import AssignmentProblem, Host
from planner.optimiser.relaxation import relax
from planner.optimiser.two_memories import even_shares, with_shares
from quant.common.errors import InfeasibleError, SpecError
from tests.planner.problems import (
    PRECISION,
    Shape,
    brute_force,
    cluster_problem,
    feasible_problems,
    of_kinds,
    small_hosted_problem,
    small_sharing_problem,
    solve,
    with_hosts,
)

OBJECTIVES: tuple[Objective, ...] = ("pipeline", "paper", "job")


def test_what_fits_agrees_with_trying_everything() -> None:
    problems = [small_hosted_problem(seed, "pipeline") for seed in range(60)]
    feasible = [is_feasible(problem) for problem in problems]
    assert feasible == [bool(np.isfinite(brute_force(problem))) for problem in problems]
    assert min(feasible.count(True), feasible.count(False)) > 10, "cases of both sorts"
    for problem, fits in zip(problems, feasible, strict=True):
        assert (explain_infeasible(problem, ["d"] * problem.stages) == "") == fits


@pytest.mark.parametrize("count", [6, pytest.param(40, marks=pytest.mark.rare)])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_method_agrees_with_trying_everything(objective: Objective, count: int) -> None:
    limited = 0
    for problem in feasible_problems(count, objective, small_hosted_problem):
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
        ample = replace(problem, host_memory_bytes=np.full(problem.stages, 1e15))
        limited += solve(ample, relative_gap=0).objective < found.objective * (1 - PRECISION)
    assert limited > 0, "problems that hosts' memory decides"


def of_two_hosts(seed: int, objective: Objective) -> AssignmentProblem:
    """Four stages of which two and two share a host, neighbours or not."""
    rng = np.random.default_rng([seed, 17])
    shape = Shape(("T4", "V100", "T4", "V100"), 5, 1024, (4,), objective=objective)
    problem = with_hosts(cluster_problem(shape, seed), seed, 0.4)
    own = rng.uniform(0.2, 1.6, 2) * problem.host_bytes.max()
    pairs = ((0, 2), (1, 3)) if rng.random() < 0.5 else ((0, 1), (2, 3))
    return replace(
        problem,
        memory_bytes=np.floor(rng.uniform(0.1, 2.0, 4) * problem.layer_bytes.max()),
        host_memory_bytes=np.repeat(np.floor(2 * own), 2)[np.argsort(np.ravel(pairs))],
        hosts=tuple(Host(*each) for each in zip(pairs, np.floor(2 * own).tolist(), strict=True)),
    )


@pytest.mark.parametrize(
    ("made", "seeds", "objective"),
    [
        (small_sharing_problem, (28, 40, 100, 143), "pipeline"),
        (of_two_hosts, range(12), "pipeline"),
        pytest.param(small_sharing_problem, range(100), "job", marks=pytest.mark.rare),
        pytest.param(of_two_hosts, range(60), "job", marks=pytest.mark.rare),
    ],
)
def test_stages_that_share_a_host_agree_with_trying_everything(
    made: Callable[[int, Objective], AssignmentProblem], seeds: Sequence[int], objective: Objective
) -> None:
    gained = 0
    for problem in (made(seed, objective) for seed in seeds):
        least = brute_force(problem)
        assert is_feasible(problem) == math.isfinite(least)
        if math.isinf(least):
            continue
        even = brute_force(with_shares(problem, even_shares(problem)))
        gained += even > least * (1 + PRECISION)
        for method in ("auto", "ilp"):
            found = solve(problem, method, relative_gap=0)
            assert found.status == "optimal"
            assert found.objective == pytest.approx(least, rel=PRECISION)
            assert found.bound == pytest.approx(least, rel=PRECISION)
            assert evaluate(problem, found.first_layer, found.bitwidth) == found.objective
        moved = solve(problem, "transfer")
        assert evaluate(problem, moved.first_layer, moved.bitwidth) == moved.objective
    assert gained > 1, "problems in which one stage lends to another what even shares would not"


def test_hosts_bytes_by_hand() -> None:
    """Two layers of 4 bytes, one with 3 of them on the host."""
    problem = replace(
        cluster_problem(Shape(("T4",), 2, 1024, bitwidths=(4,)), 0),
        **dict.fromkeys(("prefill_s", "decode_s"), np.array([[1.0, 2.0]])),
        bitwidths=(4, 4),
        layer_bytes=[4.0, 1.0],
        host_bytes=[0.0, 3.0],
        available=True,
        memory_bytes=[5.0],
        host_memory_bytes=[3.0],
        sensitivity=np.ones((2, 2)),
    )
    found = solve(problem)
    assert sorted(found.bitwidth) == [0, 1]
    times = stage_times(problem, found.first_layer, found.bitwidth)
    assert (times.bytes.tolist(), times.host_bytes.tolist()) == ([5.0], [3.0])
    short = replace(problem, host_memory_bytes=[2.9])
    assert evaluate(short, found.first_layer, found.bitwidth) == np.inf
    with pytest.raises(InfeasibleError, match="only 1 of 2 layers fit"):
        solve(short)


@pytest.mark.parametrize(
    ("sensitivity", "bitwidths", "message"),
    [
        ([[2.0, 1.0, 0.0]], (4, 4, 8), "layer 0 is 2 and 1, both at 4 bit"),
        ([[1.0, 1.0, 0.5]], (4, 8, 4), "ascending"),
    ],
)
def test_choices_of_a_bitwidth_are_of_one_quality(
    sensitivity: list[list[float]], bitwidths: tuple[int, ...], message: str
) -> None:
    problem = cluster_problem(Shape(("T4",), 1, 1024, bitwidths=(3, 4, 8)), 0)
    with pytest.raises(SpecError, match=message):
        replace(problem, sensitivity=sensitivity, bitwidths=bitwidths)


@pytest.mark.parametrize("pattern", [(0, 0, 0, 0), (0, 2, 1, 2)])
def test_boxes_agree_with_the_programme_on_many_layers(pattern: tuple[int, ...]) -> None:
    """Hosts that are as fast as devices, and whose memory is worth something."""
    shape = Shape(("T4", "V100", "A100"), 24, 7168, bitwidths=(4, 8), memory_factor=0.6)
    problem = with_hosts(of_kinds(cluster_problem(shape, 1), pattern * 6, 1), 3, 0.2)
    problem = replace(problem, joined=(2, 5, 7, 8, 9, 14))
    found, programme = solve(problem, relative_gap=1e-6), solve(problem, "ilp", relative_gap=1e-6)
    assert found.status == programme.status == "optimal"
    assert found.objective == pytest.approx(programme.objective, rel=2 * PRECISION)
    for change in (
        {"host_memory_bytes": problem.host_memory_bytes * 1.5},
        {"joined": ()},
    ):
        freer = solve(replace(problem, **change), relative_gap=1e-6)
        assert freer.objective < found.objective * (1 - 1e-5)
    tight = replace(problem, host_memory_bytes=problem.host_memory_bytes * 0.5)
    moved = solve(tight, "transfer")
    assert solve(tight).bound <= moved.objective < solve(tight, "adabits").objective
