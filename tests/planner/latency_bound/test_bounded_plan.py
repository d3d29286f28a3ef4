"""The search for schedules beside all schedules on all placements, and with hardly any time; and
the fronts of all kinds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from llmpq.report.answers import plan_choice
from planner.cluster.groups import grouped_cluster
from planner.cluster.spec import ClusterSpec
from planner.latency_bound import bounded_plan
from planner.latency_bound.alternation import PlacingGoal
from planner.latency_bound.bounded_plan import (
    KindFronts,
    LatencyPoint,
    find_bounded_plan,
    latency_front,
    reason_of,
)
from planner.latency_bound.bounded_search import BoundedSearch
from planner.latency_bound.judged import Scheduled
from planner.latency_bound.placed_layers import PipelineOfRequests
from planner.latency_bound.rra import RraPlanner, RraSpace
from planner.latency_bound.schedules import CPU_MARGIN, BoundRequest, job_of, margin_of
from planner.lengths import LengthDistribution, RequestLengths
from planner.options import QUALITIES, PlanOptions, Quality
from planner.plan.builder import CPU_GUESS
from planner.plan.parts import LatencyForecast, PlansBeside
from planner.plan.spec import PlanSpec
from planner.profiles.fit import FittedLatency
from planner.profiles.layer_terms import LayerTerms
from planner.profiles.rows import ProfileRow
from planner.scheduling import SCHEDULE_KINDS, ScheduleKind
from quant.common.errors import BoundNotMetError, DoesNotFitError
from quant.scheme import BITWIDTHS, NEAR_FULL_BITS
from tests.llmpq.bounded_plans import FRONTS, point
from tests.planner.latency_bound.settings import (
    THREE_LAYERS,
    bounded_costs,
    every_placement,
    small_cluster,
)

LENGTHS = RequestLengths(
    LengthDistribution((100, 300), (0.5, 0.5)), LengthDistribution((1, 4, 6), (0.2, 0.5, 0.3))
)
OPTIONS = PlanOptions(bits=(4, 16), head_bits=(16,), head="last", memory_margin=0.0, theta=0.0)
ONE = small_cluster([2.0], ["T4"])
QUANTILE = 0.9
"""For which simulations of a tenth of the requests do, where it is not speed that is looked at."""
MISSED = 0.02
"""What branch and bound may miss."""
JOB, MANY = 12, 200
"""Prompts of the job, more than which a turn cannot have."""


def rates_and_latencies(
    request: BoundRequest, cluster: ClusterSpec = ONE, options: PlanOptions = OPTIONS
) -> Iterator[tuple[float, float]]:
    """Yield those of all schedules on all placements, by timelines."""
    for placement in every_placement(bounded_costs(cluster, request, THREE_LAYERS, options)):
        placed = RraSpace(placement, job_of(request), request)
        for controls in itertools.product(*placed.ranges):
            found = placed.exact(controls, request.quantile)
            yield found.requests_per_s, found.latency_s


@pytest.fixture(scope="module")
def every() -> list[tuple[float, float]]:
    return list(rates_and_latencies(BoundRequest(LENGTHS, 100.0, kinds=("rra",), prompts=JOB)))


@pytest.mark.parametrize(
    "share", [0.05, 0.5, *(pytest.param(s, marks=pytest.mark.rare) for s in (0.2, 0.9))]
)
def test_nothing_within_the_bound_is_much_faster(
    every: list[tuple[float, float]], share: float
) -> None:
    """The bound is a quantile of all latencies; the search may miss 2 %, timelines be 3 % off."""
    latencies_s = sorted(latency_s for _, latency_s in every)
    bound_s = latencies_s[int(share * len(latencies_s))]
    best = max(rate for rate, latency_s in every if latency_s <= bound_s)
    request = BoundRequest(LENGTHS, bound_s, kinds=("rra",), prompts=JOB)
    found = find_bounded_plan(ONE, THREE_LAYERS, "three", request, OPTIONS, lambda: 0.0).latency
    assert found is not None
    assert found.latency_s <= bound_s
    assert found.requests_per_s >= 0.95 * best


@pytest.mark.parametrize(
    ("kind", "gib"), [("rra", [2.0]), pytest.param("waa-c", [1.2, 1.2], marks=pytest.mark.rare)]
)
def test_a_looser_bound_is_never_worse(kind: ScheduleKind, gib: list[float]) -> None:
    """No bound has less throughput at no better bits than a tighter one, but for what a search may
    miss; the last one is none, where timelines are the furthest off.
    """
    cluster = small_cluster(gib, ("T4",) * len(gib))

    def found(bound_s: float) -> Scheduled:
        request = BoundRequest(LENGTHS, None, QUANTILE, kinds=(kind,), prompts=JOB)
        costs = bounded_costs(cluster, request, THREE_LAYERS, OPTIONS)
        return BoundedSearch(costs, request, lambda: 0.0).within(bound_s)

    fastest = found(math.inf)
    rising = [*(found(share * fastest.latency_s) for share in (0.3, 1.05)), fastest]
    for tighter, looser in itertools.combinations(rising, 2):
        if looser.placed.omega >= tighter.placed.omega:
            assert looser.requests_per_s >= (1 - MISSED) * tighter.requests_per_s


def test_groups_of_equal_devices_are_tried_unless_a_degree_is_named() -> None:
    """Under a tight bound two T4 are best as one stage, of which all schedules are looked at."""
    node = {"name": "a", "accelerators": {"T4": 2}, "usable_memory_gib": 2.0}
    cluster = ClusterSpec.from_dict({"name": "two", "nodes": [node]})
    group = grouped_cluster(cluster, [tuple(each.name for each in cluster.devices)])
    request = BoundRequest(LENGTHS, 100.0, kinds=("rra",), prompts=JOB)
    grouped = list(rates_and_latencies(request, group, replace(OPTIONS, bits=(16,))))
    bound_s = 3 * min(latency_s for _, latency_s in grouped)
    request = replace(request, bound_s=bound_s)

    def rate(**given: Any) -> float:
        options = {"bits": (16,), "head": "last", "memory_margin": 0.0, "theta": 0.0} | given
        chosen = PlanOptions.of({**options, "max_request_latency_s": bound_s})
        found = find_bounded_plan(cluster, THREE_LAYERS, "three", request, chosen).latency
        assert found is not None
        return found.requests_per_s

    best = max(rate for rate, latency_s in grouped if latency_s <= bound_s)
    assert rate(tensor_parallel=1) < 0.9 * best, "groups must be faster here"
    assert rate() >= 0.95 * best


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
    request = BoundRequest(LENGTHS, 1.0, QUANTILE, kinds=("rra",), prompts=40)
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


@dataclass
class Work:
    """A clock that goes on by what is done: a pass, a timeline, a placement."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s

    def taking(self, method: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            self.now_s += seconds
            return method(*given, **named)

        return timed


def test_a_search_ends_within_its_time_limit_whatever_it_had_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock of work, with the plans of other qualities; it would go on for far longer."""
    work = Work()
    for owner, name, seconds in (
        (PipelineOfRequests, "decode", 0.001),
        (PipelineOfRequests, "prefill", 0.001),
        (RraSpace, "timeline", 0.005),
        (RraPlanner, "placed", 0.1),
    ):
        monkeypatch.setattr(owner, name, work.taking(getattr(owner, name), seconds))
    request = BoundRequest(LENGTHS, 0.03, QUANTILE, kinds=("rra",), prompts=MANY)
    took_s = []
    for limit in (2.0, 3.0, 1000.0):
        options, began_s = replace(OPTIONS, theta=None, search_time_limit=limit), work.now_s
        plan = find_bounded_plan(ONE, THREE_LAYERS, "three", request, options, work)
        took_s.append(work.now_s - began_s)
        assert plan.latency is not None
        assert plan.latency.latency_s <= 0.03
    assert took_s[0] <= 2.0
    assert took_s[1] <= 3.0 < took_s[2] / 2


@pytest.mark.parametrize(
    "quality", ["balanced", pytest.param("high", marks=pytest.mark.rare), "fast"]
)
def test_layers_are_near_16_bit_where_a_schedule_with_these_keeps_the_bound(
    quality: Quality,
) -> None:
    """Under a bound that plans of 8 and 16 bit cannot keep, it is the bound that asks for fewer."""
    for bound_s in (0.025, 0.018):
        found = planned_within(
            bound_s, replace(OPTIONS, bits=BITWIDTHS, theta=None, quality=quality)
        )
        least = min(bits for stage in found.stages for bits in stage.bitwidths)
        if near_full_bits_keep(bound_s):
            assert least >= NEAR_FULL_BITS or quality == "fast"
        else:
            assert least < NEAR_FULL_BITS


@pytest.mark.parametrize("bound_s", [0.025, 0.018])
def test_the_plans_of_other_qualities_stand_beside_as_they_are_by_themselves(
    bound_s: float,
) -> None:
    """Also where the bound asks for fewer bits, and that of 16 bit where such a plan keeps it."""
    options = replace(OPTIONS, bits=BITWIDTHS, theta=None)
    beside = within(bound_s, options).beside
    assert beside.quality == "balanced"
    assert [each.quality for each in beside.qualities] == list(QUALITIES)
    found = {each.quality: each.plan for each in beside.qualities}
    for name, choice in found.items():
        alone = planned_within(bound_s, replace(options, quality=name))
        assert plan_choice(alone).tokens_per_s == pytest.approx(choice.tokens_per_s, rel=0.05)
        assert plan_choice(alone).mean_bits == choice.mean_bits
    assert found["fast"].tokens_per_s == max(each.tokens_per_s for each in found.values())
    assert found["high"].sensitivity <= found["balanced"].sensitivity
    try:
        full = plan_choice(planned_within(bound_s, replace(options, bits=(16,))))
    except BoundNotMetError:
        assert beside.full_precision is None
    else:
        assert beside.full_precision == full


def test_without_a_quality_no_other_plan_stands_beside() -> None:
    assert within(0.025, OPTIONS).beside == PlansBeside()


@cache
def planned_within(bound_s: float, options: PlanOptions) -> PlanSpec:
    """The plan alone, without those beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_plan, "plans_beside", lambda *_: PlansBeside())
        return within(bound_s, options)


def within(bound_s: float, options: PlanOptions) -> PlanSpec:
    request = BoundRequest(LENGTHS, bound_s, QUANTILE, kinds=("rra",), prompts=JOB)
    return find_bounded_plan(ONE, THREE_LAYERS, "three", request, options, lambda: 0.0)


def near_full_bits_keep(bound_s: float) -> bool:
    """Whether a plan of 8 and 16 bit keeps the bound."""
    try:
        planned_within(bound_s, replace(OPTIONS, bits=(8, 16)))
    except BoundNotMetError:
        return False
    return True


def cpus() -> ClusterSpec:
    node = {"accelerators": {"CPU": 2}, "memory_gib": 2}
    return ClusterSpec.from_dict({"name": "cpus", "nodes": [node]})


def test_plans_for_cpus_leave_a_margin_of_the_bound() -> None:
    """And name a bound that is kept with it, where there is none within the one that was asked."""
    request = BoundRequest(LENGTHS, 1e-3, QUANTILE, kinds=("rra",), prompts=JOB)

    def planned(cluster: ClusterSpec, bound_s: float) -> LatencyForecast:
        asked = replace(request, bound_s=bound_s)
        found = find_bounded_plan(cluster, THREE_LAYERS, "three", asked, OPTIONS, lambda: 0.0)
        assert found.latency is not None
        is_guess = [each.provenance.endswith(CPU_GUESS) for each in found.stages]
        assert is_guess == [cluster is not ONE] * len(found.stages)
        return found.latency

    with pytest.raises(BoundNotMetError, match=r"done within 0\.001 s") as refused:
        planned(cpus(), 1e-3)
    least_s = refused.value.reachable
    for bound_s in (least_s, 1.5 * least_s):
        found = planned(cpus(), bound_s)
        assert (found.bound_s, found.margin) == (bound_s, CPU_MARGIN)
        assert found.latency_s <= (1 - CPU_MARGIN) * bound_s
    assert planned(ONE, 1.0).margin == 0


def test_the_margin_has_what_measured_times_vary_by() -> None:
    costs = bounded_costs(cpus(), BoundRequest(LENGTHS, 1.0))
    cpu = costs.cluster.devices[0]
    row = ProfileRow(
        *("CPU", "three", LayerTerms.of(THREE_LAYERS), 4, "decode", 16, 1, 1, 100, 0.01),
        dtype=costs.dtype(cpu),
    )
    for spreads, median in (((0.02, 0.3, 0.04), 0.04), ((None,), 0.0), ((9.0,), 0.4)):
        rows = tuple(replace(row, context_length=100 + n, spread=s) for n, s in enumerate(spreads))
        slow = replace(row, bits=3, spread=9.0), replace(row, device="T4-16GB", spread=9.0)
        fitted = replace(costs, latency=FittedLatency((*rows, *slow), costs.latency))
        assert margin_of(fitted) == pytest.approx(CPU_MARGIN + median)


def test_no_layer_has_3_bit_where_4_bit_fits_and_keeps_the_bound() -> None:
    """In so little memory that 8 bit does not fit, 3 bit would have more requests in flight."""
    options, short = replace(OPTIONS, theta=None, quality="balanced"), small_cluster([0.95], ["T4"])
    request = BoundRequest(LENGTHS, 100.0, QUANTILE, kinds=("rra",), prompts=JOB)

    def planned(*bits: int) -> PlanSpec:
        with_bits = replace(options, bits=bits)
        return find_bounded_plan(short, THREE_LAYERS, "three", request, with_bits, lambda: 0.0)

    with pytest.raises(DoesNotFitError):
        planned(8, 16)
    (stage,) = planned(*BITWIDTHS).stages
    assert stage.bitwidths == (4, 4, 4)


def test_points_of_a_front_tell_the_bits_of_their_layers() -> None:
    """Of 4 and 16 bit 16 where the bound allows it, by the rule of the quality."""
    options = replace(OPTIONS, theta=None, bits=(4, 16))
    request = BoundRequest(LENGTHS, None, QUANTILE, kinds=("rra",), prompts=JOB)
    points = latency_front(ONE, THREE_LAYERS, request, options)
    for each in (points[0], points[-1]):
        plan = planned_within(each.bound_s, options)
        assert each.bits == plan_choice(plan).mean_bits
    assert points[0].bits < points[-1].bits == 16


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
