"""The search for schedules beside all schedules on all placements, and with hardly any time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from planner.latency_bound.alternation import PlacingGoal
from planner.latency_bound.bounded_plan import find_bounded_plan
from planner.latency_bound.rra import RraPlanner, RraSpace
from planner.latency_bound.schedules import BoundRequest, job_of
from planner.lengths import LengthDistribution, RequestLengths
from planner.options import PlanOptions, Quality
from planner.plan.spec import PlanSpec
from quant.common.errors import BoundNotMetError, DoesNotFitError
from quant.scheme import BITWIDTHS, NEAR_FULL_BITS
from tests.planner.latency_bound.settings import (
    THREE_LAYERS,
    bounded_costs,
    every_placement,
    small_cluster,
)

LENGTHS = RequestLengths(
    LengthDistribution((100, 300), (0.5, 0.5)), LengthDistribution((1, 4, 6), (0.2, 0.5, 0.3))
)
OPTIONS = PlanOptions(bits=(4, 16), head="last", memory_margin=0.0, theta=0.0)
ONE = small_cluster([2.0], ["T4"])
QUANTILE = 0.9
"""For which simulations of a tenth of the requests do, where it is not speed that is looked at."""
JOB = 12
"""Prompts of the job, more than which a turn cannot have."""


def rates_and_latencies(request: BoundRequest) -> Iterator[tuple[float, float]]:
    """Yield those of all schedules on all placements, by timelines."""
    for placement in every_placement(bounded_costs(ONE, request, THREE_LAYERS, OPTIONS)):
        placed = RraSpace(placement, job_of(request), request)
        for point in itertools.product(*placed.ranges):
            found = placed.exact(point, request.quantile)
            yield found.requests_per_s, found.latency_s


@pytest.fixture(scope="module")
def every() -> list[tuple[float, float]]:
    return list(rates_and_latencies(BoundRequest(LENGTHS, 100.0, kinds=("rra",), prompts=JOB)))


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
def test_nothing_within_the_bound_is_much_faster(
    every: list[tuple[float, float]], share: float
) -> None:
    """The bound is a quantile of all latencies; the search may miss 2 %, timelines be 3 % off."""
    latencies_s = sorted(latency_s for _, latency_s in every)
    bound_s = latencies_s[int(share * len(latencies_s))]
    best = max(rate for rate, latency_s in every if latency_s <= bound_s)
    request = BoundRequest(LENGTHS, bound_s, kinds=("rra",), prompts=JOB)
    found = find_bounded_plan(ONE, THREE_LAYERS, "three", request, OPTIONS).latency
    assert found is not None
    assert found.latency_s <= bound_s
    assert found.requests_per_s >= 0.95 * best


def test_a_search_without_time_has_a_plan_that_keeps_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that has gone on by a minute whenever it is looked at."""
    placed: list[PlacingGoal] = []

    def counted(planner: RraPlanner, start: PlacingGoal, theta: float, limit_s: float) -> RraSpace:
        placed.append(start)
        return place(planner, start, theta, limit_s)

    place = RraPlanner.placed
    monkeypatch.setattr(RraPlanner, "placed", counted)
    minutes = itertools.count()
    cluster = small_cluster([15.0, 31.0])
    request = BoundRequest(LENGTHS, 1.0, QUANTILE, kinds=("rra",))
    found, searched = [], []
    for clock in (lambda: 60.0 * next(minutes), lambda: 0.0):
        placed.clear()
        plan = find_bounded_plan(cluster, THREE_LAYERS, "three", request, OPTIONS, clock)
        assert plan.latency is not None
        assert plan.latency.latency_s <= 1.0
        found.append(plan.latency.requests_per_s)
        searched.append(len(placed))
    assert searched[0] < searched[1] / 2
    assert found[0] <= 1.02 * found[1]


@pytest.mark.parametrize("quality", ["balanced", "high", "fast"])
def test_layers_are_near_16_bit_where_a_schedule_with_these_keeps_the_bound(
    quality: Quality,
) -> None:
    """Under a bound that plans of 8 and 16 bit cannot keep, it is the bound that asks for fewer."""
    options = replace(OPTIONS, bits=BITWIDTHS, theta=None, quality=quality)
    near = replace(options, bits=(8, 16))

    def planned(bound_s: float, options: PlanOptions) -> PlanSpec:
        request = BoundRequest(LENGTHS, bound_s, QUANTILE, kinds=("rra",), prompts=JOB)
        return find_bounded_plan(ONE, THREE_LAYERS, "three", request, options)

    for bound_s in (0.025, 0.018):
        least = min(bits for stage in planned(bound_s, options).stages for bits in stage.bitwidths)
        try:
            planned(bound_s, near)
        except BoundNotMetError:
            assert least < NEAR_FULL_BITS
        else:
            assert least >= NEAR_FULL_BITS or quality == "fast"


def test_no_layer_has_3_bit_where_4_bit_fits_and_keeps_the_bound() -> None:
    """In so little memory that 8 bit does not fit, 3 bit would have more requests in flight."""
    options, short = replace(OPTIONS, theta=None, quality="balanced"), small_cluster([0.95], ["T4"])
    request = BoundRequest(LENGTHS, 100.0, QUANTILE, kinds=("rra",), prompts=JOB)

    def planned(*bits: int) -> PlanSpec:
        with_bits = replace(options, bits=bits)
        return find_bounded_plan(short, THREE_LAYERS, "three", request, with_bits)

    with pytest.raises(DoesNotFitError):
        planned(8, 16)
    (stage,) = planned(*BITWIDTHS).stages
    assert stage.bitwidths == (4, 4, 4)
