"""Branch and bound against looking at every point."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from planner.latency_bound.branch_and_bound import (
    ControlPoint,
    Evaluations,
    Tolerance,
    best_within,
)
from planner.latency_bound.timeline import DOES_NOT_FIT, Performance
from tests.planner.latency_bound.random_boxes import Outcome, outcome_of, random_cases

EXACT = Tolerance(0.0, 0.0)


def _product(point: ControlPoint) -> Performance:
    """Throughput and latency that rise with both controls, in different measure."""
    first, second = point
    return Performance(first * second**0.5, first**0.5 + second)


def _best_by_looking(ranges: Sequence[range], bound_s: float) -> float:
    every = (_product((x, y)) for x, y in itertools.product(*ranges))
    return max(each.requests_per_s for each in every if each.keeps(bound_s))


@pytest.mark.parametrize("bound_s", [2.0, 3.5, 7.0, 20.0, 41.5])
def test_monotone_functions_are_searched_exactly(bound_s: float) -> None:
    ranges = (range(1, 60), range(1, 40))
    found = best_within(ranges, Evaluations(_product, bound_s), EXACT)
    assert found is not None
    assert _product(found).requests_per_s == _best_by_looking(ranges, bound_s)


def test_random_boxes_of_any_number_of_controls_are_searched_exactly() -> None:
    generator = np.random.default_rng(3)
    for sizes in [(7,), (9, 1), (5, 6), (4, 3, 5), (3, 4, 2, 3)] * 8:
        throughput, latency_s = (generator.integers(0, 3, sizes).astype(float) for _ in range(2))
        for control in range(len(sizes)):
            throughput = np.cumsum(throughput, axis=control)
            latency_s = np.cumsum(latency_s, axis=control)
        bound_s = float(generator.choice(latency_s.ravel()))

        def performance(
            point: ControlPoint, rates: np.ndarray = throughput, times: np.ndarray = latency_s
        ) -> Performance:
            return Performance(1 + float(rates[point]), float(times[point]))

        evaluated = Evaluations(performance, bound_s)
        found = best_within([range(size) for size in sizes], evaluated, EXACT)
        assert found is not None
        best = 1 + throughput[latency_s <= bound_s].max()
        assert performance(found).requests_per_s == best


def test_a_lower_corner_that_is_too_late_is_no_answer() -> None:
    """The printed listing would return it."""
    assert best_within((range(1, 9), range(1, 9)), Evaluations(_product, 1.5)) is None


def test_an_upper_corner_within_the_bound_is_the_answer_at_once() -> None:
    evaluated = Evaluations(_product, 100.0)
    assert best_within((range(1, 9), range(1, 9)), evaluated) == (8, 8)
    assert evaluated.count == 1


def test_no_point_is_evaluated_twice() -> None:
    seen = Counter[ControlPoint]()

    def performance(point: ControlPoint) -> Performance:
        seen[point] += 1
        return _product(point)

    evaluated = Evaluations(performance, 25.0)
    assert best_within((range(1, 200), range(1, 200)), evaluated) is not None
    assert evaluated.count == len(seen)
    assert set(seen.values()) == {1}


@pytest.mark.parametrize("bound_s", [1e9, math.inf])
@pytest.mark.parametrize("states_throughput", [True, False])
def test_points_without_room_are_left_out(states_throughput: bool, bound_s: float) -> None:
    evaluated = 0

    def performance(point: ControlPoint) -> Performance:
        nonlocal evaluated
        evaluated += 1
        whole = _product(point)
        if point[0] * point[1] <= 300:
            return whole
        return Performance(whole.requests_per_s, math.inf) if states_throughput else DOES_NOT_FIT

    ranges = (range(1, 60), range(1, 40))
    found = best_within(ranges, Evaluations(performance, bound_s), EXACT)
    points = (point for point in itertools.product(*ranges) if point[0] * point[1] <= 300)
    assert found is not None
    assert _product(found).requests_per_s == max(_product(p).requests_per_s for p in points)
    assert evaluated < 60 * 40 / 4


def test_only_what_is_faster_than_known_is_found() -> None:
    ranges = (range(1, 60), range(1, 40))
    best = _best_by_looking(ranges, 20.0)
    assert best_within(ranges, Evaluations(_product, 20.0, more_than=best), EXACT) is None
    nearly = best_within(ranges, Evaluations(_product, 20.0, more_than=best * 0.999), EXACT)
    assert nearly is not None
    assert _product(nearly).requests_per_s == best


def _check(outcomes: list[Outcome]) -> None:
    """The goals: the same throughput within the tolerance for a twentieth of the evaluations."""
    assert min(each.reached for each in outcomes) >= 1 / (1 + Tolerance().throughput)
    assert max(each.reached for each in outcomes) <= 1
    assert np.mean([each.evaluated for each in outcomes]) <= 0.05


def test_random_cases_come_out_as_by_exhaustive_search() -> None:
    _check([outcome_of(case) for case in random_cases(20, seed=1)])


@pytest.mark.rare
def test_three_hundred_random_cases_come_out_as_by_exhaustive_search() -> None:
    _check([outcome_of(case) for case in random_cases(300)])
