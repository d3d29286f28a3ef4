"""Which kind of schedule is best within which bound, against looking at every point."""

from __future__ import annotations

import numpy as np
import pytest

from planner.latency_bound.front import KindFronts, LatencyPoint, reason_of
from planner.scheduling import SCHEDULE_KINDS
from tests.llmpq.bounded_plans import FRONTS, point


def random_fronts(seed: int) -> KindFronts:
    """Ascending points of two or three kinds."""
    generator = np.random.default_rng(seed)
    points: list[LatencyPoint] = []
    for kind in SCHEDULE_KINDS[: generator.integers(2, 4)]:
        count = int(generator.integers(1, 9))
        bounds = np.sort(generator.uniform(1, 100, count))
        rates = np.sort(generator.uniform(1, 50, count))
        points += [
            point(float(b), kind, float(r), int(generator.integers(1, 99)))
            for b, r in zip(bounds, rates, strict=True)
        ]
    return KindFronts(tuple(points))


@pytest.mark.parametrize("seed", range(20))
def test_rows_have_the_best_point_of_each_kind_within_their_bound(seed: int) -> None:
    fronts = random_fronts(seed)
    for row in fronts.rows:
        within = [each for each in fronts.points if each.bound_s <= row.bound_s]
        assert row.best.requests_per_s == max(each.requests_per_s for each in within)
        for kind in fronts.kinds:
            own = [each.requests_per_s for each in within if each.schedule.kind == kind]
            found = row.of(kind)
            assert (found.requests_per_s if found else 0.0) == max(own, default=0.0)


@pytest.mark.parametrize("seed", range(20))
def test_between_rows_nothing_better_can_be_had(seed: int) -> None:
    fronts = random_fronts(seed)
    rows = fronts.rows
    rates = [row.best.requests_per_s for row in rows]
    assert rates == sorted(set(rates))
    assert rates[-1] == max(each.requests_per_s for each in fronts.points)
    for each in fronts.points:
        kept = [row for row in rows if row.bound_s <= each.bound_s]
        assert kept[-1].best.requests_per_s >= each.requests_per_s


def test_runs_have_one_best_kind_each() -> None:
    kinds = [{row.best.schedule.kind for row in run} for run in FRONTS.runs]
    assert kinds == [{"waa-c"}, {"rra"}, {"waa-c"}, {"rra"}]


def test_reasons_name_what_the_next_best_has_not() -> None:
    reasons = [reason_of(run) for run in FRONTS.runs]
    assert reasons[0] == "the only one that keeps the bound"
    assert "RRA prefills 6 requests after every 4 steps" in reasons[2]
    assert "90 requests decode at a time, 30 with WAA-C" in reasons[3]
    by_memory = KindFronts((point(9.0, "waa-c", 2.0, 10), point(9.0, "waa-m", 3.0, 25)))
    assert reason_of(by_memory.rows) == "25 requests decode at a time, 10 with WAA-C"
    by_time = KindFronts((point(9.0, "waa-c", 4.0, 10), point(9.0, "waa-m", 3.0, 25)))
    assert "sides take more equally long than those of WAA-M" in reason_of(by_time.rows)
    few = KindFronts((point(9.0, "rra", 4.0, 10), point(9.0, "waa-m", 3.0, 25)))
    assert "all devices serve either phase" in reason_of(few.rows)
