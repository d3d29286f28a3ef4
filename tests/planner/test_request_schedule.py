"""How many requests a schedule's tolerance allows: in whole numbers, and everywhere the same."""

from __future__ import annotations

from decimal import ROUND_FLOOR, Decimal

import pytest

from actors.schedule.exegpt_waa import DecodeScheduler
from planner.latency_bound.schedules import cycle_of, most_in_group
from planner.lengths import Lengths
from planner.schedule.passes import TurnSizes
from planner.schedule.turns import Turns
from planner.scheduling import RequestSchedule, ScheduleKind
from planner.workload import Job
from tests.actors.schedule.exegpt_cases import queue_sizes_of

TOLERANCES = ("0.05", "0.1", "0.25", "0.29", "0.9")
JOB = Job(100, Lengths((8,), (4,)))


def schedule_of(
    kind: ScheduleKind, requests: int, tolerance: str, groups: int = 1
) -> RequestSchedule:
    return RequestSchedule(kind, 1, requests, 1, groups, 1, 8.0, float(tolerance))


@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_as_many_requests_are_in_flight_as_the_tolerance_allows(tolerance: str) -> None:
    """Held against decimal numbers, for 400 sizes; 50, 90 and 100 have 55, 99 and 110."""
    for requests in range(1, 401):
        allowed = (1 + Decimal(tolerance)) * requests
        most = int(allowed.to_integral_value(ROUND_FLOOR))
        schedule = schedule_of("rra", requests, tolerance)
        assert schedule.most_in_flight == most
        assert cycle_of(schedule, JOB).in_flight == most
        assert TurnSizes.of(schedule, 10**6).slots == most + 1, "and a turn"


@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_planner_and_runtime_have_groups_of_one_size(tolerance: str) -> None:
    for requests in range(1, 101):
        for groups in (1, 3, 4):
            turns = schedule_of("rra", requests, tolerance, groups)
            sizes = TurnSizes.of(turns, 10**6)
            assert sizes.decode_micro_batch == Turns.of(turns).most == most_in_group(turns)
            divided = schedule_of("waa-c", requests, tolerance, groups)
            needed = TurnSizes(divided, 200, 200, 1, 200)
            scheduler = DecodeScheduler(queue_sizes_of(needed, 200), 1)
            assert scheduler._most_in_group == most_in_group(divided)
            assert most_in_group(divided) * groups >= divided.most_in_flight


@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_numbers_of_a_group_are_within_the_tolerance_or_next_to_the_mean(tolerance: str) -> None:
    for requests in range(1, 101):
        for groups in range(1, 6):
            turns = Turns.of(schedule_of("rra", requests, tolerance, groups))
            share, mean = Decimal(tolerance), Decimal(requests)
            for size in range(2 * requests + 2):
                near = abs(size * groups - mean) < groups
                within = (1 - share) * mean <= size * groups <= (1 + share) * mean
                assert (turns.least <= size <= turns.most) == (near or within), (requests, size)
