"""Plans of built-in models with experts and constant states, their bytes counted by hand."""

from __future__ import annotations

from llmpq import Cluster
from planner.model.finding import model_shape
from planner.plan.check import check_plan
from planner.plan.spec import PlanSpec
from planner.workload import Workload

BATCH, PROMPT, NEW = 8, 512, 100
TOKENS = BATCH * (PROMPT + NEW)
A100S = Cluster.from_counts(["A100-SXM4-80GB"], [2])


def plan_of(name: str) -> PlanSpec:
    workload = Workload(BATCH, PROMPT, NEW)
    found = A100S.plan(name, workload, bits=(16,), head="last", search_time_limit=600).spec
    check_plan(found, model_shape(name))
    return found


def layers_of(plan: PlanSpec) -> tuple[int, int]:
    """Bytes of all layers' weights, and of their keys, values and states."""
    stages = plan.stages
    return sum(s.memory.weights for s in stages), sum(s.memory.kv_cache for s in stages)


def test_all_experts_are_held() -> None:
    """Qwen3-30B-A3B: 48 layers of 128 experts; keys and values of 4 heads of 128 numbers."""
    attention = 2048 * (2 * 4096 + 2 * 512) + 2 * 128
    experts = 128 * (3 * 768 * 2048 + 2048)  # with the router's row for each
    weights, cache = layers_of(plan_of("qwen3-30b-a3b"))
    assert weights == 2 * 48 * (attention + experts + 2 * 2048)
    assert cache == 48 * TOKENS * 2 * 2 * 4 * 128


def test_states_are_held_of_requests_and_keys_of_tokens() -> None:
    """Qwen3.5-27B: 48 of 64 layers have 48 states of 128 by 128 numbers of 32 bit and 3 inputs of a
    convolution of 10240 channels, the others keys and values of 4 heads of 256 numbers.
    """
    weights, cache = layers_of(plan_of("qwen3.5-27b"))
    mlp, norms = 3 * 5120 * 17408, 2 * 5120
    full = 5120 * (2 * 6144 + 2 * 1024) + 6144 * 5120 + 2 * 256
    linear = 5120 * (10240 + 6144 + 2 * 48) + 6144 * 5120 + 4 * 10240 + 128
    linear += 2 * 2 * 48  # decays and their biases are held in 32 bit
    assert weights == 2 * (64 * (mlp + norms) + 16 * full + 48 * linear)
    state = 48 * 128 * 128 * 4 + 3 * 10240 * 2
    assert cache == 48 * BATCH * state + 16 * TOKENS * 2 * 2 * 4 * 256
