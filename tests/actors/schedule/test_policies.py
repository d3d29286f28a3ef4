"""The table of scheduling policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.processes.health import BatchFailure
from actors.recovery.generation import halved
from actors.schedule.exegpt import RraScheduler
from actors.schedule.orca import OrcaScheduler
from actors.schedule.peak import PeakScheduler
from actors.schedule.s3 import S3Scheduler
from actors.schedule.scheduler import QueueSizes
from actors.schedule.static import StaticScheduler
from actors.schedule.table import POLICIES, make_scheduler, queue_sizes
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.kv_copies import parking
from planner.plan.spec import PlanSpec
from planner.scheduling import POLICY_NAMES, PolicyOptions, RequestSchedule
from planner.search.find import find_plan
from planner.workload import Workload
from quant.common.errors import SpecError
from tests.planner.bounded import bounded


@pytest.fixture(scope="module")
def plan() -> PlanSpec:
    cluster = ClusterSpec.from_counts(["T4"], [2])
    options = PlanOptions(bits=(4, 16), keep_all_devices=True, group=4)
    workload = Workload(5, 128, 10, slot_tokens=132)
    return find_plan(cluster, model_shape("opt-6.7b"), "opt-6.7b", workload, options).plan


def test_a_plans_policy_makes_the_scheduler(plan: PlanSpec) -> None:
    static = make_scheduler(queue_sizes(plan, PolicyOptions()), 2)
    assert isinstance(static, StaticScheduler)
    assert static.most_under_way == 4
    orca = make_scheduler(queue_sizes(plan, PolicyOptions("orca")), 2)
    assert isinstance(orca, OrcaScheduler)
    assert orca.most_under_way == 2
    s3 = make_scheduler(queue_sizes(plan, PolicyOptions("s3")), 2)
    assert isinstance(s3, PeakScheduler)
    assert s3.most_under_way == 2
    published = make_scheduler(queue_sizes(plan, PolicyOptions("s3-published")), 2)
    assert type(published) is S3Scheduler


SCHEDULE = RequestSchedule("rra", 4, 12, 3, 2, 2, 100.0)


def test_a_plans_schedule_makes_the_scheduler(plan: PlanSpec) -> None:
    """Groups have a tenth more than 6 requests, and as many as their mean at least."""
    exegpt = bounded(plan, SCHEDULE, 600)
    sizes = queue_sizes(exegpt, exegpt.policy)
    assert sizes == QueueSizes(
        17, 2, 6, 132, "exegpt", kv_tokens=600, n_slots=570, schedule=SCHEDULE
    )
    scheduler = make_scheduler(sizes, 2)
    assert isinstance(scheduler, RraScheduler)
    assert scheduler.most_under_way == 4
    limits = sizes.limits(132, 600, columns=8)
    assert (limits.requests, limits.rows, limits.slots) == (8, 2 * 132 + 6, 17)


def test_a_plan_without_a_schedule_is_refused(plan: PlanSpec) -> None:
    with pytest.raises(SpecError, match="llmpq plan --max_request_latency_s"):
        queue_sizes(plan, PolicyOptions("exegpt"))


def test_short_memory_halves_prefills_or_groups_of_a_schedule(plan: PlanSpec) -> None:
    exegpt = bounded(plan, SCHEDULE, 600)
    sizes = queue_sizes(exegpt, exegpt.policy)
    prefill = halved(sizes, BatchFailure("memory", "prefill", (0, 1), "out of memory"))
    assert prefill == replace(sizes, prefill_micro_batch=1)
    decode = halved(sizes, BatchFailure("memory", "decode", tuple(range(6)), "out of memory"))
    assert decode == replace(sizes, decode_micro_batch=3)
    assert isinstance(make_scheduler(decode, 2), RraScheduler)


def test_s3_has_the_sizes_of_orca_and_a_way_back_for_preempted_requests(plan: PlanSpec) -> None:
    """By the plan's own times, within the host memory that there is."""
    options = {"max_batch_size": 3, "prefill_chunk_tokens": 16}
    s3 = queue_sizes(plan, PolicyOptions("s3", **options))
    orca = queue_sizes(plan, PolicyOptions("orca", **options))
    least, most = parking(plan)
    assert s3 == replace(orca, policy="s3", park_tokens_from=least, parked_tokens=most)
    assert 1 < least < most


@pytest.mark.parametrize("name", ["park_tokens_from", "parked_tokens"])
def test_sizes_that_there_cannot_be_are_refused(name: str, plan: PlanSpec) -> None:
    sizes = queue_sizes(plan, PolicyOptions("s3"))
    with pytest.raises(SpecError, match=f"{name} is -1; the policy s3 needs at least 0"):
        make_scheduler(replace(sizes, **{name: -1}), 2)


def test_orca_has_the_tokens_and_the_micro_batch_of_the_plan(plan: PlanSpec) -> None:
    decode = plan.micro_batches.decode
    sizes = queue_sizes(plan, PolicyOptions("orca"))
    assert (sizes.kv_tokens, sizes.max_batch_size) == (5 * 132, decode)
    assert (sizes.slots, sizes.policy) == (2 * decode, "orca")
    assert queue_sizes(plan, PolicyOptions()) == QueueSizes(
        5, plan.micro_batches.prefill, decode, 132
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "fifo"}, "policy is 'fifo'; it must be one of static, orca"),
        ({"name": "orca", "max_batch_size": 0}, "max_batch_size is 0; .* from 1"),
        ({"name": "orca", "prefill_chunk_tokens": -1}, "prefill_chunk_tokens is -1; .* from 0"),
        ({"max_batch_size": 4}, "max_batch_size has no effect with policy static"),
    ],
)
def test_what_no_policy_has_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        PolicyOptions(**options)


def test_every_policy_has_a_name_to_choose() -> None:
    assert tuple(POLICIES) == POLICY_NAMES


def test_short_memory_halves_batches_that_mix_the_phases() -> None:
    sizes = QueueSizes(24, 2, 12, 64, "orca", kv_tokens=99, max_batch_size=12)
    failure = BatchFailure("memory", "mixed", tuple(range(7)), "out of memory")
    smaller = halved(sizes, failure)
    assert smaller == QueueSizes(24, 2, 12, 64, "orca", kv_tokens=99, max_batch_size=3)
    assert isinstance(make_scheduler(smaller, 2), OrcaScheduler)
