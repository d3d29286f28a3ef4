"""The table of scheduling policies."""

from __future__ import annotations

import pytest

from actors.processes.health import BatchFailure
from actors.recovery.generation import halved
from actors.schedule.orca import OrcaScheduler
from actors.schedule.scheduler import QueueSizes
from actors.schedule.static import StaticScheduler
from actors.schedule.table import make_scheduler, queue_sizes
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.search.search import find_plan
from planner.workload import Workload
from quant.common.errors import SpecError


@pytest.fixture(scope="module")
def plan() -> PlanSpec:
    cluster = ClusterSpec.from_counts(["T4"], [2])
    options = PlanOptions(bits=(4, 16), keep_all_devices=True, group=4)
    workload = Workload(5, 128, 10, slot_tokens=132)
    return find_plan(cluster, model_shape("opt-6.7b"), "opt-6.7b", workload, options)


def test_a_plans_policy_makes_the_scheduler(plan: PlanSpec) -> None:
    static = make_scheduler(queue_sizes(plan, "static"), 2)
    assert isinstance(static, StaticScheduler)
    assert static.most_under_way == 4
    orca = make_scheduler(queue_sizes(plan, "orca"), 2)
    assert isinstance(orca, OrcaScheduler)
    assert orca.most_under_way == 2


def test_orca_has_the_tokens_and_the_micro_batch_of_the_plan(plan: PlanSpec) -> None:
    decode = plan.micro_batches.decode
    sizes = queue_sizes(plan, "orca")
    assert (sizes.kv_tokens, sizes.max_batch_size) == (5 * 132, decode)
    assert (sizes.slots, sizes.policy) == (2 * decode, "orca")
    assert queue_sizes(plan, "static") == QueueSizes(5, plan.micro_batches.prefill, decode)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(SpecError, match=r"no policy 'fifo'; choose one of static, orca"):
        make_scheduler(QueueSizes(4, 2, 2, policy="fifo"), 2)


def test_short_memory_halves_batches_that_mix_the_phases() -> None:
    sizes = QueueSizes(24, 2, 12, "orca", kv_tokens=99, max_batch_size=12)
    failure = BatchFailure("memory", "prefill", tuple(range(7)), "out of memory")
    smaller = halved(sizes, failure)
    assert smaller == QueueSizes(24, 2, 12, "orca", kv_tokens=99, max_batch_size=3)
    assert isinstance(make_scheduler(smaller, 2), OrcaScheduler)
