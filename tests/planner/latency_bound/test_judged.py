"""What is seen of schedules where timelines are wrong: stages by formula, of one control."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest

from planner.latency_bound.alternation import ScheduleSpace
from planner.latency_bound.judged import MOST_AIMS, Judge
from planner.latency_bound.schedules import BoundRequest
from planner.latency_bound.simulate import ObservedRequests
from planner.latency_bound.timeline import Performance, Timeline
from planner.lengths import LengthDistribution, RequestLengths
from planner.scheduling import RequestSchedule

ONE = LengthDistribution((1,), (1.0,))
MOST = 100
REQUEST = BoundRequest(RequestLengths(ONE, ONE), 1.0)
Seen = Callable[[int], tuple[float, float]]


@dataclass(eq=False)
class Formula:
    """Of `requests` that decode a timeline says as many a second, and as many seconds; `seen` says
    what events show.
    """

    seen: Seen
    request: BoundRequest = REQUEST
    key: str = "formula"
    ranges: tuple[range, ...] = (range(1, MOST + 1),)
    simulated: list[int] = field(default_factory=list)

    def schedule(self, point: tuple[int]) -> RequestSchedule:
        return RequestSchedule("waa-c", 1, point[0], 1, 1, 1, 1.0)

    def has_room(self, schedule: RequestSchedule) -> bool:
        return True

    def exact(self, point: tuple[int], quantile: float) -> Performance:
        return Performance(float(point[0]), float(point[0]))

    def timeline(self, schedule: RequestSchedule, quantile: float) -> Timeline:
        return Timeline(self.exact((schedule.decode_requests,), quantile), 1.0, np.ones(2))

    def observed(
        self, schedule: RequestSchedule, count: int, check_time: Callable[[], None]
    ) -> ObservedRequests:
        self.simulated.append(schedule.decode_requests)
        rate, latency_s = self.seen(schedule.decode_requests)
        strata, frequent = np.zeros(count, dtype=np.int64), np.ones(1)
        return ObservedRequests(rate, np.full(count, latency_s), strata, frequent)


def best(formula: Formula, bound_s: float) -> int | None:
    judge, placed = Judge(), cast(ScheduleSpace, formula)
    judge.look(placed, (formula.ranges,), bound_s)
    kept = max(judge.kept(bound_s), key=lambda each: each.requests_per_s, default=None)
    return None if kept is None else kept.schedule.decode_requests


@pytest.mark.parametrize("factor", [0.4, 0.8, 0.97, 1.0, 1.02, 1.3, 2.5])
def test_the_bound_is_reached_however_long_events_take_beside_timelines(factor: float) -> None:
    """To some percent, in a few simulations of the 100 schedules that there are."""
    formula = Formula(lambda n: (float(n), factor * n))
    found, bound_s = best(formula, 40.0), 40.0
    assert found is not None
    assert 0.93 * bound_s <= min(MOST, found) * factor <= bound_s or found == MOST
    assert len(formula.simulated) <= MOST_AIMS + 2


def test_a_schedule_of_a_tighter_bound_is_taken_where_it_is_faster() -> None:
    """As of groups in step, by which more requests that decode may be served in fewer seconds."""

    def in_step(most: int) -> Formula:
        return Formula(lambda n: (3.0 if n > most else float(n), float(n)))

    assert 20 < (best(in_step(30), 40.0) or 0) <= 30
    assert 50 < (best(in_step(70), math.inf) or 0) <= 70


def test_where_only_few_requests_keep_the_bound_these_are_found() -> None:
    formula = Formula(lambda n: (float(n), 1.0 if n <= 3 else 1000.0))
    assert best(formula, 40.0) in (1, 2, 3)
    assert best(Formula(lambda n: (1.0, 1000.0)), 40.0) is None
