"""Schedules for stages that run: within the bound for what was measured, and within their sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.costs.pass_times import PassTable
from planner.latency_bound.alternation import ScheduleSpace
from planner.latency_bound.bounded_plan import find_bounded_plan
from planner.latency_bound.branch_and_bound import ControlPoint
from planner.latency_bound.reschedule import RunningSizes, reschedule
from planner.latency_bound.schedules import BOUND, BoundRequest
from planner.latency_bound.simulate import ObservedRequests, RequestWatch, simulate_rra
from planner.latency_bound.timeline import Performance
from planner.lengths import LengthDistribution, RequestLengths
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.schedule.turns import Turns
from planner.scheduling import RequestSchedule
from quant.common.errors import BoundNotMetError, SpecError
from tests.planner.latency_bound.settings import bounded_costs, small_cluster

CLUSTER = small_cluster([15.0, 31.0])
SHAPE = model_shape("opt-1.3b")
OPTIONS = PlanOptions(bits=(8,), keep_all_devices=True, theta=0.0)
PROMPTS = LengthDistribution.truncated_normal(128, 60, 256)
BOUND_S = 0.6
QUANTILE = 0.9


def lengths(mean: float) -> RequestLengths:
    """Outputs of about so many tokens, of at most 40."""
    return RequestLengths(PROMPTS, LengthDistribution.truncated_normal(mean, mean / 3, 40))


PLANNED, LONGER, SHORTER = lengths(12), lengths(24), lengths(5)


@pytest.fixture(scope="module")
def plan() -> PlanSpec:
    request = BoundRequest(PLANNED, BOUND_S, QUANTILE, kinds=("rra",))
    return find_bounded_plan(CLUSTER, SHAPE, "opt-1.3b", request, OPTIONS, lambda: 0.0)


@pytest.fixture(scope="module")
def longer(plan: PlanSpec) -> PlanSpec:
    """The plan made again for longer outputs."""
    return again(plan, LONGER)


def again(plan: PlanSpec, measured: RequestLengths) -> PlanSpec:
    assert plan.origin is not None
    return reschedule(plan, SHAPE, plan.origin.options, measured)


def schedule_of(plan: PlanSpec) -> RequestSchedule:
    return plan.policy.followed_schedule


def observed(
    plan: PlanSpec, schedule: RequestSchedule, measured: RequestLengths
) -> ObservedRequests:
    """What events show on the stages of `plan`, of requests drawn anew."""
    costs = bounded_costs(CLUSTER, BoundRequest(measured, None), SHAPE, OPTIONS)
    by_name = {device.name: device for device in CLUSTER.devices}
    devices = [by_name[stage.device] for stage in plan.stages]
    first_layer = [0, *(stage.layers.stop for stage in plan.stages)]
    costs = replace(costs, head_on_first=plan.head_on_first)
    times = PassTable.of(costs, devices, first_layer, [0] * SHAPE.layers)
    watch = RequestWatch(3 * schedule.decode_requests, 1000)
    return simulate_rra(times, measured, schedule, watch, np.random.default_rng(7))


def test_longer_outputs_have_a_schedule_that_keeps_the_bound(
    plan: PlanSpec, longer: PlanSpec
) -> None:
    """The old one would not; both by events, with other requests than the search drew."""
    found = longer
    assert observed(plan, schedule_of(plan), LONGER).latency_s(QUANTILE) > 1.2 * BOUND_S
    seen = observed(plan, schedule_of(found), LONGER)
    assert seen.latency_s(QUANTILE) <= 1.03 * BOUND_S
    assert found.latency is not None
    assert found.latency.latency_s <= BOUND_S
    assert found.latency.lengths == LONGER
    assert seen.requests_per_s == pytest.approx(found.latency.requests_per_s, rel=0.05)


def test_shorter_outputs_have_a_schedule_of_more_throughput(plan: PlanSpec) -> None:
    found = schedule_of(again(plan, SHORTER))
    before, now = (observed(plan, each, SHORTER) for each in (schedule_of(plan), found))
    assert now.requests_per_s > 1.02 * before.requests_per_s
    assert now.latency_s(QUANTILE) <= 1.03 * BOUND_S


def test_the_bound_is_kept_where_timelines_are_far_below_what_events_show(
    plan: PlanSpec, longer: PlanSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if they were three times too short: with half of the throughput, not the least latency."""
    usual = longer.latency
    exact = ScheduleSpace.exact

    def short(placed: ScheduleSpace, point: ControlPoint, quantile: float) -> Performance:
        found = exact(placed, point, quantile)
        return replace(found, latency_s=found.latency_s / 3)

    monkeypatch.setattr(ScheduleSpace, "exact", short)
    found = again(plan, LONGER).latency
    assert usual is not None
    assert found is not None
    assert found.latency_s <= BOUND_S
    assert found.requests_per_s > 0.5 * usual.requests_per_s


@pytest.mark.rare
def test_stages_have_room_for_one_schedule_after_the_other(plan: PlanSpec) -> None:
    """Nothing but the schedule and its forecast differs, and what memory was allocated for."""
    sizes, now = RunningSizes.of(plan), plan
    for measured in (LONGER, SHORTER, PLANNED, SHORTER):
        now = again(now, measured)
        assert replace(now, policy=plan.policy, latency=plan.latency) == plan
        schedule = schedule_of(now)
        assert schedule.most_in_flight <= plan.workload.global_batch
        assert Turns.of(schedule).most <= sizes.decode_micro_batch <= plan.micro_batches.decode
        assert schedule.prefill_micro_batch == plan.micro_batches.prefill
        reserved = measured.prompts.mean + plan.workload.new_tokens
        assert schedule.decode_requests * reserved <= plan.workload.reservable_tokens


def test_for_the_lengths_that_were_planned_the_schedule_stays_or_is_faster(plan: PlanSpec) -> None:
    """A search on layers that lie where they are never makes a run slower."""
    found = again(plan, PLANNED)
    assert plan.latency is not None
    assert found.latency is not None
    assert found.latency.requests_per_s >= plan.latency.requests_per_s
    assert found.latency.latency_s <= BOUND_S


def test_a_bound_below_all_schedules_is_refused_with_the_least(plan: PlanSpec) -> None:
    assert plan.latency is not None
    tight = replace(plan, latency=replace(plan.latency, bound_s=0.1))
    with pytest.raises(BoundNotMetError, match="layers where they are") as refused:
        again(tight, LONGER)
    assert refused.value.option == BOUND
    least = replace(plan, latency=replace(plan.latency, bound_s=refused.value.reachable))
    found = again(least, LONGER).latency
    assert found is not None
    assert found.latency_s <= refused.value.reachable


def test_only_plans_with_a_schedule_have_another(plan: PlanSpec) -> None:
    with pytest.raises(SpecError, match="forecast of its schedule"):
        reschedule(replace(plan, latency=None), SHAPE, OPTIONS, LONGER)


def test_a_margin_is_left_of_the_bound(plan: PlanSpec) -> None:
    """As much of it as requests were late, by a schedule that is slower for that."""
    assert plan.origin is not None
    assert plan.latency is not None
    found = reschedule(plan, SHAPE, plan.origin.options, PLANNED, 0.25).latency
    assert found is not None
    assert (found.bound_s, found.margin) == (BOUND_S, 0.25)
    assert found.latency_s <= 0.75 * BOUND_S < plan.latency.latency_s
    assert found.requests_per_s < plan.latency.requests_per_s
