"""Schedules for stages that run and do one phase each: within the bound for what was measured, and
within what either kind of stages was given.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from planner.latency_bound.alternation import ScheduleSpace
from planner.latency_bound.bounded_plan import find_bounded_plan
from planner.latency_bound.branch_and_bound import ControlPoint
from planner.latency_bound.placed_layers import PlacedLayers, WaaSides, handover_of
from planner.latency_bound.reschedule import RunningSizes, reschedule
from planner.latency_bound.schedules import BOUND, BoundRequest, most_in_group
from planner.latency_bound.simulate import ObservedRequests, RequestWatch, simulate_waa
from planner.latency_bound.timeline import Performance
from planner.lengths import LengthDistribution, RequestLengths
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.kv_copies import warn_of_handover
from planner.plan.spec import PlanSpec
from planner.scheduling import PolicyOptions, RequestSchedule
from quant.common.errors import BoundNotMetError, InfeasibleError, SpecError
from tests.planner.latency_bound.settings import bounded_costs, placement_of, small_cluster

CLUSTER = small_cluster([15.0, 31.0])
SHAPE = model_shape("opt-1.3b")
OPTIONS = PlanOptions(bits=(8,), keep_all_devices=True, theta=0.0)
BOUND_S = 3.0
QUANTILE = 0.9


def lengths(outputs: float, prompts: float = 128) -> RequestLengths:
    """Prompts of about so many tokens, of at most 256, and outputs of at most 80."""
    of = LengthDistribution.truncated_normal
    return RequestLengths(of(prompts, 60, 256), of(outputs, outputs / 3, 80))


PLANNED, LONGER, SHORTER, LONGER_PROMPTS = (
    lengths(24),
    lengths(48),
    lengths(10),
    lengths(24, prompts=220),
)


@pytest.fixture(scope="module")
def plan() -> PlanSpec:
    """The V100 prefills and the T4 decodes."""
    request = BoundRequest(PLANNED, BOUND_S, QUANTILE, kinds=("waa-c",))
    found = find_bounded_plan(CLUSTER, SHAPE, "opt-1.3b", request, OPTIONS, lambda: 0.0)
    assert found.prefill_plan is not None
    return found


@pytest.fixture(scope="module")
def longer(plan: PlanSpec) -> PlanSpec:
    """The plan made again for longer outputs."""
    return again(plan, LONGER)


def again(plan: PlanSpec, measured: RequestLengths) -> PlanSpec:
    assert plan.origin is not None
    return reschedule(plan, SHAPE, plan.origin.options, measured)


def test_prompts_that_wait_without_room_are_told(plan: PlanSpec) -> None:
    """The hosts of the cluster state no memory, of which 4 GiB are taken."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_handover(plan)
    crowded = replace(schedule_of(plan), prefill_requests=1000)
    with pytest.warns(UserWarning, match=r"wait to decode have .* tokens.*host_memory_gib"):
        warn_of_handover(following(plan, crowded))


def schedule_of(plan: PlanSpec) -> RequestSchedule:
    return plan.policy.followed_schedule


def following(plan: PlanSpec, schedule: RequestSchedule) -> PlanSpec:
    return replace(plan, policy=PolicyOptions("exegpt", schedule=schedule))


def bounded(plan: PlanSpec, bound_s: float | None) -> PlanSpec:
    assert plan.latency is not None
    return replace(plan, latency=replace(plan.latency, bound_s=bound_s))


def observed(
    plan: PlanSpec, schedule: RequestSchedule, measured: RequestLengths
) -> ObservedRequests:
    """What events show on the stages of `plan`, of requests drawn anew."""
    assert plan.prefill_plan is not None
    costs = bounded_costs(CLUSTER, BoundRequest(measured, None), SHAPE, OPTIONS)
    by_name = {device.name: device for device in CLUSTER.devices}

    def side(part: PlanSpec) -> PlacedLayers:
        devices = [by_name[stage.device] for stage in part.stages]
        counts = [[len(stage.layers)] for stage in part.stages]
        return placement_of(replace(costs, head_on_first=part.head_on_first), devices, counts)

    prefill, decode = side(plan.prefill_plan), side(plan)
    handover = handover_of(prefill, decode)
    sides = WaaSides(prefill.exact_times, decode.exact_times, handover, measured)
    watch = RequestWatch(3 * schedule.decode_requests, 2000)
    return simulate_waa(sides, schedule, watch, np.random.default_rng(7))


def test_longer_outputs_have_a_schedule_that_keeps_the_bound(
    plan: PlanSpec, longer: PlanSpec
) -> None:
    """The old one would not; both by events, with other requests than the search drew."""
    found = longer
    assert observed(plan, schedule_of(plan), LONGER).latency_s(QUANTILE) > 1.15 * BOUND_S
    seen = observed(plan, schedule_of(found), LONGER)
    assert seen.latency_s(QUANTILE) <= 1.03 * BOUND_S
    assert found.latency is not None
    assert found.latency.latency_s <= BOUND_S
    assert found.latency.lengths == LONGER
    assert seen.requests_per_s == pytest.approx(found.latency.requests_per_s, rel=0.05)


def test_requests_that_decode_are_as_many_as_the_bound_allows(
    plan: PlanSpec, longer: PlanSpec
) -> None:
    """A tenth more, with newcomers for them, would be above it."""
    found = schedule_of(longer)
    more = replace(
        found,
        decode_requests=round(1.1 * found.decode_requests),
        prefill_requests=found.prefill_requests + 1,
        prefill_micro_batch=found.prefill_micro_batch + 1,
    )
    assert observed(plan, more, LONGER).latency_s(QUANTILE) > BOUND_S


def test_the_present_schedule_is_kept_where_none_is_faster(plan: PlanSpec) -> None:
    """With just what was forecast, as layers, times and lengths are those of the plan."""
    found = again(plan, PLANNED)
    assert schedule_of(found) == schedule_of(plan)
    assert found.latency is not None
    assert plan.latency is not None
    assert replace(found.latency, evaluations=0) == replace(plan.latency, evaluations=0)


def test_a_schedule_that_is_slow_gives_way_to_a_faster_one(plan: PlanSpec) -> None:
    """As fast as that of the plan: the stages have kept the room for it."""
    few = replace(schedule_of(plan), prefill_requests=2, decode_requests=40, prefill_micro_batch=2)
    found = schedule_of(again(following(plan, few), PLANNED))
    slow, fast, now = (observed(plan, each, PLANNED) for each in (few, schedule_of(plan), found))
    assert slow.requests_per_s < 0.9 * fast.requests_per_s
    assert now.requests_per_s > 0.97 * fast.requests_per_s
    assert now.latency_s(QUANTILE) <= 1.03 * BOUND_S


@pytest.mark.rare
def test_the_bound_is_kept_where_timelines_are_far_below_what_events_show(
    plan: PlanSpec, longer: PlanSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if they were three times too short: with most of the throughput, not the least latency."""
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
    assert found.requests_per_s > 0.7 * usual.requests_per_s


def test_stages_have_room_for_one_schedule_after_the_other(
    plan: PlanSpec, longer: PlanSpec
) -> None:
    """Nothing but the schedule and its forecast differs, and what memory was allocated for."""
    sizes, now = RunningSizes.of(plan), longer
    assert plan.prefill_plan is not None
    for measured in (LONGER, SHORTER, LONGER_PROMPTS, PLANNED):
        now = longer if measured is LONGER else again(now, measured)
        assert replace(now, policy=plan.policy, latency=plan.latency) == plan
        schedule = schedule_of(now)
        assert schedule.kind == "waa-c"
        assert schedule.most_in_flight <= plan.workload.global_batch
        assert most_in_group(schedule) <= plan.micro_batches.decode
        assert schedule.prefill_micro_batch <= plan.prefill_plan.micro_batches.prefill
        reserved = measured.prompts.mean + plan.workload.new_tokens
        assert schedule.decode_requests * reserved <= plan.workload.reservable_tokens
        assert RunningSizes.of(now) == sizes


def test_groups_are_more_where_one_would_be_too_large_for_a_micro_batch(plan: PlanSpec) -> None:
    """One group is the fastest on one stage."""
    half = plan.micro_batches.decode // 2 + 1
    assert schedule_of(plan).decode_micro_batches == 1
    smaller = following(plan, replace(schedule_of(plan), decode_micro_batches=2))
    smaller = replace(smaller, micro_batches=replace(plan.micro_batches, decode=half))
    found = schedule_of(again(bounded(smaller, None), LONGER))
    assert found.decode_micro_batches == 2
    assert found.decode_requests > half
    assert most_in_group(found) <= half


def test_newcomers_are_fewer_where_host_memory_is_short(
    plan: PlanSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer prompts take more of it: turns on their stages, waiting, and on their way."""
    unbounded = bounded(plan, None)
    free = schedule_of(again(unbounded, LONGER_PROMPTS))
    monkeypatch.setattr("planner.plan.kv_copies.UNSTATED_BYTES", 1000)
    found = schedule_of(again(unbounded, LONGER_PROMPTS))
    before = schedule_of(plan)
    least = before.prefill_requests * before.mean_prompt_tokens
    assert found.prefill_requests * LONGER_PROMPTS.prompts.mean <= least
    assert found.prefill_requests < free.prefill_requests
    one = following(unbounded, replace(before, prefill_requests=1, prefill_micro_batch=1))
    assert schedule_of(again(one, LONGER_PROMPTS)).prefill_requests == 1


def test_a_bound_below_all_schedules_is_refused_with_the_least(plan: PlanSpec) -> None:
    with pytest.raises(BoundNotMetError, match="waa-c, with layers where they are") as refused:
        again(bounded(plan, 0.1), LONGER)
    assert refused.value.option == BOUND
    found = again(bounded(plan, refused.value.reachable), LONGER).latency
    assert found is not None
    assert found.latency_s <= refused.value.reachable


def test_stages_without_room_for_one_request_are_refused(plan: PlanSpec) -> None:
    short = replace(plan.workload, global_batch=1, n_slots=None, prompt_length=1, new_tokens=80)
    with pytest.raises(InfeasibleError, match="no room for the longer requests"):
        again(replace(plan, workload=short), LONGER)


def test_only_plans_with_their_origin_have_another(plan: PlanSpec) -> None:
    with pytest.raises(SpecError, match="its origin has another"):
        reschedule(replace(plan, origin=None), SHAPE, OPTIONS, LONGER)
