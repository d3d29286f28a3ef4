"""Costs of layers with experts or a constant state, and of models that have several kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from planner.cluster.device import Device, Slowdown
from planner.cluster.spec import ClusterSpec
from planner.costs.adjusted_latency import EightBitCacheLatency, GroupLatency, SlowedLatency
from planner.costs.latency_model import RememberedLatency
from planner.costs.memory import (
    StageEnds,
    StageWork,
    fixed_stage_memory,
    memory_with_layers,
    temporary_bytes,
)
from planner.costs.roofline import RooflineLatency
from planner.costs.stored_bytes import kv_cache_bytes_per_layer, layer_weight_bytes
from planner.costs.temporaries import expert_row_bytes, mixer_bytes
from planner.model.finding import shape_from_config
from planner.model.layer_parts import Experts, LayerChoice
from planner.model.shape import ModelShape
from planner.workload import MicroBatches, Workload
from quant.backends.table import rule_for
from tests.planner.costs.test_memory import PeakBytes
from tests.planner.kinds import tiny_experts
from tests.planner.model.mixed_configs import MIXED

WORKLOAD = Workload(global_batch=6, prompt_length=30, new_tokens=10)
SIZES = MicroBatches(2, 3)
DELTA, FULL = 0, 1  # kinds of the model below, whose fourth layer is full
QWEN3_NEXT = shape_from_config("qwen3-next", MIXED["qwen3_next"])
LARGE_EXPERTS = Experts(count=128, per_token=8, width=768)


def device(name: str = "V100") -> Device:
    return ClusterSpec.from_counts([name], [1]).devices[0]


def large(**own: Any) -> ModelShape:
    """Layers of Qwen3-30B-A3B, or what else `own` makes of them."""
    config = MIXED["qwen3_moe"] | {"hidden_size": 2048, "head_dim": 128, "num_hidden_layers": 48}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 40960}
    shape = shape_from_config("large", config | heads | {"vocab_size": 151936})
    return replace(shape, **{"experts": LARGE_EXPERTS, **own})


def test_all_experts_are_held() -> None:
    shape, v100 = large(), device()
    attention, each = 2048 * (2 * 4096 + 2 * 512), 3 * 2048 * 768
    others = 2048 * 128 + 2 * 2048 + 2 * 128  # the router, norms
    whole = attention + 128 * each + others
    assert layer_weight_bytes(shape, 16, v100, "float16") == 2 * whole
    published = 48 * whole + 2 * 151936 * 2048 + 2048
    assert shape.total_parameters == published == pytest.approx(30.5e9, rel=2e-3)
    rows = 4096 + 2 * 512 + 2048 + 128 * (2 * 768 + 2048)
    in_4_bit = (attention + 128 * each) * (1 / 2 + 2 / 32) + 2 * rows + 2 * others
    assert layer_weight_bytes(shape, 4, v100, "float16", "torch_4bit") == in_4_bit


def test_layers_of_a_kind_hold_their_own_state() -> None:
    """Two value heads for each of two key heads of 16 by 8 numbers, and a convolution over the 64
    channels of queries and keys and 32 of values, of which 3 inputs are kept.
    """
    delta, full = QWEN3_NEXT.kinds
    states = 6 * (4 * 4 * 16 * 8 + 2 * 3 * (2 * 32 + 32))
    assert kv_cache_bytes_per_layer(delta, WORKLOAD, 16, "float16") == states
    assert kv_cache_bytes_per_layer(delta, WORKLOAD, 8, "float16") == states
    assert kv_cache_bytes_per_layer(full, WORKLOAD, 16, "float16") == 2 * 240 * 64 * 2
    assert kv_cache_bytes_per_layer(full, WORKLOAD, 8, "float16") == 2 * 240 * (64 + 2 * 2)
    reads_others = replace(full, reads_earlier_keys=True)
    assert not kv_cache_bytes_per_layer(reads_others, WORKLOAD, 8, "float16")


def test_a_stage_adds_up_its_own_layers() -> None:
    t4, work = device("T4"), StageWork(QWEN3_NEXT, WORKLOAD, SIZES, "float16", kv_bits=8)
    fixed = fixed_stage_memory(work, t4, StageEnds.of(1, 2))
    chosen = [LayerChoice.whole(bits) for bits in (4, 8, 16, 4)]
    found = memory_with_layers(work, t4, range(2, 6), chosen, fixed)
    kinds = [QWEN3_NEXT.kinds[kind] for kind in (DELTA, FULL, DELTA, DELTA)]
    weights = (
        layer_weight_bytes(shape, bits, t4, "float16")
        for shape, bits in zip(kinds, (4, 8, 16, 4), strict=True)
    )
    assert found.weights == sum(weights)
    caches = (kv_cache_bytes_per_layer(shape, WORKLOAD, 8, "float16") for shape in kinds)
    assert found.kv_cache == sum(caches)
    assert found.fixed == fixed.total
    alone = [temporary_bytes(replace(work, shape=each), StageEnds()) for each in QWEN3_NEXT.kinds]
    assert temporary_bytes(work, StageEnds()) == max(alone)


@pytest.mark.parametrize(
    ("rule", "tokens"),
    [(torch_chunk_gated_delta_rule, 200), (torch_recurrent_gated_delta_rule, 1)],
)
def test_temporaries_cover_the_gated_delta_rule(rule: Callable[..., Any], tokens: int) -> None:
    mixer, requests = QWEN3_NEXT.kinds[DELTA].delta, 3
    assert mixer is not None
    keys = torch.rand(requests, tokens, mixer.key_heads, mixer.key_dim)
    values = torch.rand(requests, tokens, mixer.value_heads, mixer.value_dim)
    rates = torch.rand(requests, tokens, mixer.value_heads)
    state = torch.zeros(requests, mixer.value_heads, mixer.key_dim, mixer.value_dim)
    with torch.inference_mode(), PeakBytes() as seen:
        rule(
            *(keys, keys.clone(), values),
            g=-rates,
            beta=rates,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
    planned = mixer_bytes(mixer, 0, (requests, requests * tokens), 4)
    assert seen.peak <= planned <= 3 * seen.peak


def test_steps_of_a_kernel_copy_no_state() -> None:
    mixer = replace(QWEN3_NEXT.kinds[DELTA].delta, key_dim=128, value_dim=128, value_heads=32)
    shape = large(experts=None, delta=mixer, intermediate_size=64)
    work = StageWork(shape, Workload(64, 4, 4), MicroBatches(1, 64), "float16", quantized=False)
    plain, own = (temporary_bytes(work, StageEnds(), each) for each in (None, device().processor))
    assert plain - own > 64 * 4 * 32 * 128 * 128
    odd = replace(work, shape=replace(shape, delta=replace(mixer, key_dim=256)))
    assert temporary_bytes(odd, StageEnds(), device().processor) > plain
    times = [
        RooflineLatency(replace(shape, delta=each)).layer_decode_s(device(), 16, 1, 9, "float16")
        for each in (mixer, replace(mixer, value_dim=130))
    ]
    assert times[1] - times[0] == pytest.approx((66 - 8) * 5e-6, rel=0.1)


def test_temporaries_cover_products_grouped_by_expert() -> None:
    experts, hidden_size, tokens = Experts(count=6, per_token=2, width=48), 64, 40
    module, rows = tiny_experts(experts, hidden_size), torch.rand(tokens, hidden_size)
    asked = torch.stack([torch.randperm(6)[:2] for _ in range(tokens)])
    with torch.inference_mode(), PeakBytes() as seen:
        module(rows, asked, torch.rand(tokens, 2))
    planned = expert_row_bytes(experts, hidden_size, tokens, 4) + 2 * tokens * hidden_size * 4
    assert seen.peak <= planned <= 1.5 * seen.peak


def test_a_token_costs_less_of_its_experts_in_larger_batches() -> None:
    """What wider experts take more in a step are the weights of E (1 - (1 - k/E)^t) of them."""
    v100, wider = device(), replace(LARGE_EXPERTS, width=2 * 768)

    def more_s(tokens: int) -> float:
        both = (RooflineLatency(large(experts=each)) for each in (wider, LARGE_EXPERTS))
        seconds = [each.layer_decode_s(v100, 16, tokens, 10, "float16") for each in both]
        return seconds[0] - seconds[1]

    for tokens in (1, 4, 16, 64, 256):
        asked = 128 * (1 - (1 - 8 / 128) ** tokens)
        read_s = asked * 3 * 2048 * 768 * 2 / (0.66 * 900e9)
        assert more_s(tokens) == pytest.approx(read_s, rel=0.02)
    assert more_s(256) / 256 < more_s(16) / 16 / 8 < more_s(1) / 8


def test_few_products_of_experts_start_together() -> None:
    """Two of each expert: from 33 tokens on 8 of 128 are asked one after another."""
    v100, latency = device(), RooflineLatency(large())
    rule = rule_for(v100.processor, 8, large().expert_linears[0], "float16", decode_rows=32)
    assert rule.name == "cuda_8bit"
    times = [latency.layer_decode_s(v100, 8, t, 10, "float16") for t in (31, 32, 33, 34)]
    steps = np.diff(times)
    asked = LARGE_EXPERTS.asked(33)
    assert steps[1] - steps[0] == pytest.approx((22 + 2 * asked - 13) * 5e-6, rel=0.05)
    assert abs(steps[2] - steps[0]) < 0.05 * steps[1]


def test_prompts_multiply_the_experts_of_each_token_alone() -> None:
    v100 = device()
    sparse, dense = (
        RooflineLatency(large()),
        RooflineLatency(large(experts=None, intermediate_size=6144)),
    )
    both = [each.layer_prefill_s(v100, 16, 8, 2048, "float16") for each in (sparse, dense)]
    assert both[1] < both[0] < 1.25 * both[1]


def test_constant_states_take_no_longer_with_the_context() -> None:
    v100, mixer = device(), replace(QWEN3_NEXT.kinds[DELTA].delta, key_dim=128, value_dim=128)
    latency = RooflineLatency(large(experts=None, delta=replace(mixer, value_heads=32)))
    steps = [latency.layer_decode_s(v100, 16, 64, length, "float16") for length in (10, 9_000)]
    assert steps[0] == steps[1]
    mixers = [
        latency.layer_seconds(v100, 16, "decode", requests, 10, "float16").attention_s
        for requests in (64, 128)
    ]
    moved_bytes = 2 * 4 * 32 * 128 * 128 * 64  # of 64 states, read and written
    assert mixers[1] == pytest.approx(2 * mixers[0])
    assert mixers[0] == pytest.approx(moved_bytes / (0.66 * 900e9), rel=0.1)
    prompts = [
        latency.layer_seconds(v100, 16, "prefill", 1, length, "float16").attention_s
        for length in (2048, 4096)
    ]
    assert prompts[1] == pytest.approx(2 * prompts[0], rel=0.01)


def test_derived_times_keep_kinds_apart() -> None:
    roofline = RooflineLatency(QWEN3_NEXT)
    v100 = replace(device(), slowdown=Slowdown(2.0, 3.0))
    latency = RememberedLatency(SlowedLatency(GroupLatency(EightBitCacheLatency(roofline, 8), 8)))
    for phase, factor in (("prefill", 2.0), ("decode", 3.0)):
        for kind, shape in enumerate(QWEN3_NEXT.kinds):
            own = latency.of_kind(kind)
            assert own.shape is shape
            assert latency.of_kind(kind) is own
            workload = v100, 4, phase, 3, 40, "float16"
            found = own.layer_seconds(*workload)
            plain, coded = (
                RooflineLatency(shape, bits).layer_seconds(*workload) for bits in (16, 8)
            )
            assert found.rest_s == pytest.approx(factor * plain.rest_s)
            assert found.attention_s == pytest.approx(factor * coded.attention_s)
    equal = RememberedLatency(RooflineLatency(large()))
    assert equal.of_kind(0) is equal
