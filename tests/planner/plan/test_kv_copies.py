"""What plans say of preempted requests, whether they are parked and how many tokens of them, and of
heads that prompts share.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import yaml

from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.kv_copies import (
    HEAD_SHARE,
    HOST_SHARE,
    PINNED_ROUNDING,
    UNSTATED_BYTES,
    Parking,
    head_tokens,
    host_copies,
    parking,
)
from planner.plan.spec import PlanSpec
from planner.workload import Workload
from tests.planner.plan_alone import find_plan

NODE = "name: one\nnodes: [{name: a, accelerators: {T4: 2}%s}]\n"
KV_BYTES_PER_TOKEN = 32 * 2 * 4096 * 2  # opt-6.7b in fp16


def plan_of(text: str, **options: object) -> PlanSpec:
    cluster = ClusterSpec.from_dict(yaml.safe_load(text), "test")
    given = PlanOptions(bits=(4,), keep_all_devices=True, group=4, **options)  # type: ignore[arg-type]
    return find_plan(
        cluster, model_shape("opt-6.7b"), "opt-6.7b", Workload(8, 256, 200), given
    ).plan


@pytest.fixture(scope="module")
def plan() -> PlanSpec:
    return plan_of(NODE % ", host_memory_gib: 2")


def test_bytes_and_rates_are_those_of_the_model_and_the_cluster(plan: PlanSpec) -> None:
    copies = host_copies(plan)
    assert sum(each.kv_bytes_per_token for each in copies) == KV_BYTES_PER_TOKEN
    assert {each.host_link_bytes_per_s for each in copies} == {16e9}
    assert [each.tensors for each in copies] == [2 * len(s.layers) for s in plan.stages]
    slower = plan_of(NODE % ", host_link_gbyte_per_s: 3")
    assert {each.host_link_bytes_per_s for each in host_copies(slower)} == {3e9}
    without = replace(slower, origin=None)
    assert {each.host_link_bytes_per_s for each in host_copies(without)} == {16e9}


def test_pinned_blocks_of_any_requests_fit_into_the_hosts_share(plan: PlanSpec) -> None:
    """Each tensor of a request's copies is a block, which torch rounds up to a power of two."""
    rng = np.random.default_rng(0)
    tensors, per_tensor = 32 * 2, 4096 * 2
    assert tensors * per_tensor == KV_BYTES_PER_TOKEN
    for _ in range(50):
        left, pinned = parking(plan).most_tokens, 0
        while left:
            tokens = min(left, int(rng.integers(1, 457)))
            pinned += tensors * 2 ** (tokens * per_tensor - 1).bit_length()
            left -= tokens
        assert pinned <= HOST_SHARE * 2 * 2**30


def test_a_node_parks_in_its_share_of_the_hosts_memory(plan: PlanSpec) -> None:
    room = int(HOST_SHARE * 2 * 2**30 / (PINNED_ROUNDING * KV_BYTES_PER_TOKEN))
    parked, heads = parking(plan).most_tokens, head_tokens(plan)
    assert parked == int((1 - HEAD_SHARE) * room) < plan.workload.kv_tokens
    assert heads == int(HEAD_SHARE * room) < plan.workload.kv_tokens
    longest = max(each.kv_bytes_per_token for each in host_copies(plan))
    unstated = parking(replace(plan, origin=None)).most_tokens
    assert unstated == min(
        plan.workload.kv_tokens,
        int((1 - HEAD_SHARE) * UNSTATED_BYTES / (PINNED_ROUNDING * longest)),
    )


def test_copying_is_cheaper_over_fast_links_alone(plan: PlanSpec) -> None:
    """A T4 computes a token of half the layers in 0.3 ms, and copies it both ways in 0.03."""
    least = parking(plan).tokens_from
    copies = host_copies(plan)
    per_prompt = plan.micro_batches.prefill * plan.workload.prompt_length
    tokens = np.arange(1, plan.workload.total_length + 1)
    compute_s = max(stage.prefill_s for stage in plan.stages) / per_prompt * tokens
    copy_s = [2 * max(each.one_way_s(n) for each in copies) for n in tokens.tolist()]
    assert least == 1 + int(np.flatnonzero(np.array(copy_s) < compute_s)[0]) > 1
    slow = plan_of(NODE % ", host_memory_gib: 2, host_link_gbyte_per_s: 0.1")
    assert parking(slow) == Parking(0, 0)


def test_a_cpu_parks_in_what_its_own_limit_leaves() -> None:
    node = "name: one\nnodes: [{name: a, accelerators: {CPU: 1}, threads: 2, memory_gib: %s}]\n"
    ample, scarce = plan_of(node % 64), plan_of(node % 5.8)
    assert parking(ample).most_tokens == ample.workload.kv_tokens
    (stage,) = scarce.stages
    left = stage.memory_limit_bytes - stage.memory_bytes
    room = int((1 - HEAD_SHARE) * left / KV_BYTES_PER_TOKEN)
    assert room < scarce.workload.kv_tokens
    assert parking(scarce) in (Parking(0, 0), Parking(parking(scarce).tokens_from, room))
