"""Attention and the rest of a layer are apart in its seconds (ExeGPT section 3), on devices and in
groups, and give those of micro-batches of unlike prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from planner.cluster.device import Device, Slowdown
from planner.cluster.groups import group_of
from planner.cluster.spec import ClusterSpec
from planner.costs.adjusted_latency import EightBitCacheLatency, GroupLatency, SlowedLatency
from planner.costs.latency_model import LatencyModel, PartsOf, RememberedLatency, unlike_prompts_s
from planner.costs.machine import roofline_efficiency
from planner.costs.roofline import RooflineLatency
from planner.lengths import LengthDistribution
from planner.model.finding import model_shape
from planner.scheduling import PHASES, Phase

SHAPE = model_shape("opt-13b")
ROOFLINE = RooflineLatency(SHAPE)
PROMPTS = LengthDistribution.truncated_normal(256, 252, 512)


def device(kind: str, degree: int = 1) -> Device:
    return group_of(ClusterSpec.from_counts([kind], [degree]).devices)


def arithmetic_s(kind: str, flops: float) -> float:
    """Seconds of attention's arithmetic, at half the rate of large products."""
    accelerator = device(kind).accelerator
    rate = accelerator.fp16_flops * roofline_efficiency(accelerator).arithmetic
    return flops / rate / 0.5


def reading_s(kind: str, moved: float) -> float:
    accelerator = device(kind).accelerator
    return moved / accelerator.memory_bytes_per_s / roofline_efficiency(accelerator).bandwidth


def parts_on(own: Device, bits: int = 16, model: LatencyModel = ROOFLINE) -> PartsOf:
    def parts(requests: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        found = model.layer_seconds(own, bits, "prefill", requests, length, "float16")
        return np.array([found.attention_s]), np.array([found.rest_s])

    return parts


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(
    "model",
    [
        ROOFLINE,
        GroupLatency(ROOFLINE),
        RememberedLatency(SlowedLatency(GroupLatency(ROOFLINE))),
        EightBitCacheLatency(ROOFLINE, 8),
    ],
)
def test_parts_add_up_to_the_layer(model: LatencyModel, degree: int, phase: Phase) -> None:
    own = replace(device("T4", degree), slowdown=Slowdown(1.5, 2.5))
    whole = model.layer_prefill_s if phase == "prefill" else model.layer_decode_s
    for bits, requests, length in ((16, 3, 700), (4, 1, 5), (8, 32, 100)):
        parts = model.layer_seconds(own, bits, phase, requests, length, "float16")
        assert min(parts.attention_s, parts.rest_s) > 0
        assert parts.attention_s + parts.rest_s == whole(own, bits, requests, length, "float16")


def test_slowdowns_are_of_both_parts() -> None:
    own = replace(device("T4"), slowdown=Slowdown(1.5, 2.5))
    factors: dict[Phase, float] = {"prefill": 1.5, "decode": 2.5}
    for phase, factor in factors.items():
        workload = own, 8, phase, 4, 300, "float16"
        plain, slowed = (m.layer_seconds(*workload) for m in (ROOFLINE, SlowedLatency(ROOFLINE)))
        assert slowed.attention_s == pytest.approx(factor * plain.attention_s)
        assert slowed.rest_s == pytest.approx(factor * plain.rest_s)


@pytest.mark.parametrize("kind", ["T4", "A100-40G"])
def test_attention_of_the_roofline_is_its_closed_form(kind: str) -> None:
    """Two products of 2 operations for each pair and channel over the causal half; in decode the
    keys and values of all tokens, read once.
    """
    own, width = device(kind), SHAPE.query_width

    def attention_s(phase: Phase, requests: int, length: int) -> float:
        return ROOFLINE.layer_seconds(own, 4, phase, requests, length, "float16").attention_s

    for requests, length in ((1, 2048), (3, 1024)):
        flops = 2 * 2 * requests * length**2 / 2 * width
        assert attention_s("prefill", requests, length) == pytest.approx(arithmetic_s(kind, flops))
    for requests, context in ((1, 500), (16, 2000)):
        moved = 2 * requests * (context + 1) * width * 2
        assert attention_s("decode", requests, context) == pytest.approx(reading_s(kind, moved))


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("kind", ["T4", "A100-40G"])
def test_the_rest_depends_on_the_sum_of_tokens_alone(kind: str, degree: int) -> None:
    own, model = device(kind, degree), GroupLatency(ROOFLINE)
    for bits in (3, 4, 8, 16):
        rest_s = {
            model.layer_seconds(own, bits, "prefill", 4096 // n, n, "float16").rest_s
            for n in (32, 512, 4096)
        }
        assert len(rest_s) == 1
        contexts = (1, 100, 2000)
        in_decode = [
            model.layer_seconds(own, bits, "decode", 32, n, "float16").rest_s for n in contexts
        ]
        assert len(set(in_decode)) == 1


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_share_out_the_heads_of_attention_and_sum_the_rest(degree: int, phase: Phase) -> None:
    """40 heads of OPT-13b over 2 or 4 ranks; what hidden states are summed takes is not less."""
    model, one, group = GroupLatency(ROOFLINE), device("T4"), device("T4", degree)
    for requests, length in ((1, 1500), (16, 600)):
        alone, shared = (
            model.layer_seconds(each, 4, phase, requests, length, "float16")
            for each in (one, group)
        )
        assert shared.attention_s == pytest.approx(alone.attention_s / degree)
        assert alone.rest_s / degree < shared.rest_s


def together_s(kind: str, prompts: Sequence[int], tokens_s: Callable[[int], float]) -> float:
    """Seconds of a layer over unlike prompts, in one row but for attention."""
    flops = sum(2 * length**2 * SHAPE.query_width for length in prompts)
    return tokens_s(sum(prompts)) + arithmetic_s(kind, flops)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("kind", ["T4", "A100-40G"])
def test_unlike_prompts_take_the_rest_of_all_tokens_and_attention_each(
    kind: str, bits: int
) -> None:
    own, drawn = device(kind), PROMPTS.drawn(800, np.random.default_rng(0)).reshape(200, 4)

    def tokens_s(tokens: int) -> float:
        return ROOFLINE.layer_seconds(own, bits, "prefill", 1, tokens, "float16").rest_s

    parts = parts_on(own, bits)
    for batch in drawn.tolist():
        if min(batch) > 150:  # shorter ones are bound by reading
            exact_s = together_s(kind, batch, tokens_s)
            assert unlike_prompts_s(batch, parts)[0] == pytest.approx(exact_s, rel=2e-3)


def test_a_long_prompt_among_short_ones_is_not_many_of_medium_length() -> None:
    """As many tokens, nearly four times as many pairs of queries and keys."""
    parts = parts_on(device("A100-40G"))
    lone, alike = (unlike_prompts_s(p, parts)[0] for p in ([7800] + [25] * 8, [889] * 9))
    flops = 2 * SHAPE.query_width * (7800**2 + 8 * 25**2 - 9 * (8000 / 9) ** 2)
    assert lone - alike == pytest.approx(arithmetic_s("A100-40G", flops), rel=0.03)


def test_prompts_alike_take_their_own_time() -> None:
    """At lengths that stand for themselves exactly."""
    own = device("T4")
    for requests, length in ((4, 40), (3, 512), (1, 48)):
        assert unlike_prompts_s([length] * requests, parts_on(own))[0] == pytest.approx(
            ROOFLINE.layer_prefill_s(own, 16, requests, length, "float16"), rel=5e-3
        )


def test_what_is_read_of_eight_bit_keys_is_attention() -> None:
    coded, workload = EightBitCacheLatency(ROOFLINE, 8), (device("T4"), 4, "decode", 8, 900)
    full, eight = (m.layer_seconds(*workload, "float16") for m in (ROOFLINE, coded))
    assert eight.rest_s == full.rest_s
    assert eight.attention_s == pytest.approx(
        RooflineLatency(SHAPE, 8).layer_seconds(*workload, "float16").attention_s
    )
    assert eight.attention_s < 0.6 * full.attention_s
