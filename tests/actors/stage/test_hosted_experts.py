"""Tokens of stages whose experts have bits of their own, or lie in the host's memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.stage.stage import Stage
from quant.hosted_experts import HostedExperts
from quant.rounding.canonical import dequantize, quantize
from quant.scheme import Processor
from tests.actors.models import (
    EVERY_CONFIG,
    LAYERS,
    generate,
    random_prompts,
    reference,
    save_tiny,
    specs_of,
)

LENGTHS, NEW_TOKENS = (5, 11, 1, 8, 17), 9
EXPERT_BITS = (4, 16, 3, 8, 4)


@pytest.mark.parametrize("hosted", [(), (0, 3, 4)])
def test_tokens_equal_generate_with_the_experts_that_the_bits_stand_for(
    hosted: tuple[int, ...], tmp_path: Path
) -> None:
    """Prompts stream, decode steps are computed on the host."""
    model = save_tiny(tmp_path, EVERY_CONFIG["qwen3_moe"])
    for layer, bits in zip(model.model.layers, EXPERT_BITS, strict=True):
        experts = getattr(layer.mlp, "experts", None)
        for part in ("gate_up_proj", "down_proj") if experts is not None and bits < 16 else ():
            weights = getattr(experts, part).data
            for index, weight in enumerate(weights):
                weights[index] = dequantize(quantize(weight, bits))
    prompts = random_prompts(LENGTHS)
    expected = [reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    specs = [
        replace(
            spec,
            expert_bitwidths=EXPERT_BITS[spec.layers.start : spec.layers.stop],
            hosted_experts=tuple(layer for layer in hosted if layer in spec.layers),
            streams_from=8,
        )
        for spec in specs_of((0, 2, LAYERS), len(prompts), max(LENGTHS) + NEW_TOKENS)
    ]
    weight_only = Processor(instruction_sets=frozenset())
    stages = [Stage(spec, tmp_path, torch.device("cpu"), weight_only) for spec in specs]
    assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3) == expected
    found = [each for stage in stages for each in stage._model.modules()]
    assert sum(isinstance(each, HostedExperts) for each in found) == len(hosted)
