"""Attention and the rest of a layer are apart in its seconds (ExeGPT section 3): what that tells of
micro-batches of unlike prompts.
"""

from __future__ import annotations

import numpy as np
import pytest

from planner.cluster.device import Device
from planner.cluster.groups import group_of
from planner.cluster.spec import ClusterSpec
from planner.costs.group_latency import GroupLatency
from planner.costs.roofline import RooflineLatency, _Machine
from planner.length_distribution import LengthDistribution
from planner.model.finding import model_shape

SHAPE = model_shape("opt-13b")
ROOFLINE = RooflineLatency(SHAPE)
PROMPTS = LengthDistribution.truncated_normal(256, 252, 512)


def device(kind: str, degree: int = 1) -> Device:
    return group_of(ClusterSpec.from_counts([kind], [degree]).devices)


def together_s(device: Device, bits: int, prompts: list[int]) -> float:
    """Seconds of a layer over unlike prompts: the rest by all tokens, attention by each prompt."""
    pairs = sum(length**2 / 2 for length in prompts)
    machine = _Machine.of(device, "float16")
    return ROOFLINE._layer_s(machine, bits, sum(prompts), pairs, sum(prompts))


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("kind", ["T4", "A100-40G"])
def test_what_is_not_attention_depends_on_the_sum_of_tokens_alone(kind: str, degree: int) -> None:
    """So as many tokens in fewer prompts take the same time more at every bitwidth, and four times
    as much where prompts are twice as long and attention is bound by arithmetic.
    """
    group, model = device(kind, degree), GroupLatency(ROOFLINE)

    def seconds(bits: int, prompts: int, length: int) -> float:
        return model.layer_prefill_s(group, bits, prompts, length, "float16")

    more_s = [
        [seconds(bits, 4096 // (2 * length), 2 * length) - seconds(bits, 4096 // length, length)
         for length in (512, 1024)]
        for bits in (3, 4, 8, 16)
    ]  # fmt: skip
    for own in more_s:
        assert own == pytest.approx(more_s[0], rel=1e-6)
        assert own[1] == pytest.approx(2 * own[0], rel=1e-6)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("kind", ["T4", "A100-40G"])
def test_prompts_all_alike_stand_for_unlike_ones(kind: str, bits: int) -> None:
    """The mean of prefills whose prompts all have one of the lengths, as simulations take it."""
    own, drawn = device(kind), PROMPTS.drawn(800, np.random.default_rng(0)).reshape(200, 4)
    lengths, places = np.unique(drawn, return_inverse=True)
    alike_s = np.array([together_s(own, bits, [int(each)] * 4) for each in lengths])
    mean_s = alike_s[places].mean()
    assert mean_s == pytest.approx(
        np.mean([together_s(own, bits, batch) for batch in drawn.tolist()]), rel=0.02
    )
    batch = [int(lengths[0])] * 4
    assert together_s(own, bits, batch) == pytest.approx(
        ROOFLINE.layer_prefill_s(own, bits, 4, batch[0], "float16")
    )
