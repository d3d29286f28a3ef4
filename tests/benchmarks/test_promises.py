"""What schedules promise by simulated events is what the runtime's schedulers come to."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.reproduction.latency_bounds.runtime import seen_by_runtime
from planner.latency_bound.alternation import ScheduleSpace
from planner.latency_bound.bounded_plan import bounded_plan
from planner.latency_bound.judged import Scheduled
from planner.latency_bound.rra import RraSpace
from planner.latency_bound.schedules import BoundRequest, job_of, rra_schedule
from planner.latency_bound.waa import WaaPlanner
from planner.lengths import LengthDistribution, RequestLengths
from tests.planner.latency_bound.settings import bounded_costs, placement_of, small_cluster

LENGTHS = RequestLengths(
    LengthDistribution.truncated_normal(60, 40, 150),
    LengthDistribution((1, 4, 12), (0.1, 0.6, 0.3)),
)
QUANTILE, REQUESTS = 0.9, 1024
REQUEST = BoundRequest(LENGTHS, None, QUANTILE)
COSTS = bounded_costs(small_cluster([15.0, 31.0]), REQUEST)


def assert_promises_are_kept(placed: ScheduleSpace, scheduled: Scheduled) -> None:
    plan = bounded_plan(scheduled, COSTS, "three layers", "")
    seen = seen_by_runtime(plan, scheduled, REQUESTS)
    assert seen.requests_per_s == pytest.approx(scheduled.requests_per_s, rel=0.04)
    assert seen.latency_s(QUANTILE) == pytest.approx(scheduled.latency_s, rel=0.06)


@pytest.mark.parametrize("newcomers", range(1, 9))
def test_turns_of_few_newcomers(newcomers: int) -> None:
    """In one to three groups on two stages."""
    rng = np.random.default_rng(newcomers)
    steps, groups, size = (int(rng.integers(1, most)) for most in (9, 4, 4))
    schedule = rra_schedule(LENGTHS, newcomers, steps, groups, size)
    first, second = COSTS.cluster.devices
    placed = RraSpace(
        placement_of(COSTS, (first, second), ((0, 1), (0, 2))), job_of(REQUEST), REQUEST
    )
    assert_promises_are_kept(placed, Scheduled.of(placed, schedule))


@pytest.mark.parametrize("decoding", [2, 3, 12])
def test_stages_that_prefill_beside_others_that_decode(decoding: int) -> None:
    """Requests reserve token slots: of two in flight, one often waits for room."""
    planner = WaaPlanner("waa-c", COSTS, job_of(REQUEST), REQUEST, lambda: 0.0)
    placed = planner.placed(next(planner.starts()), 0.0, 1.0)
    assert_promises_are_kept(placed, Scheduled.of(placed, placed.schedule((decoding,))))
