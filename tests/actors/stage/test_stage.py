"""A stage's quantized layers and its memory against the whole model and the planner's rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from actors.stage.stage import Stage
from planner.costs.stored_bytes import (
    embedding_bytes,
    head_bytes,
    kv_cache_bytes_per_layer,
    layer_weight_bytes,
    norm_bytes,
)
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.workload import Workload
from quant.common.errors import CheckpointError, DeviceError
from quant.rounding.canonical import dequantize, quantize
from quant.scheme import Processor
from tests.actors.configs import CONFIGS, LAYERS
from tests.actors.models import generate, random_prompts, references, save_tiny, stages_of

MIXED_BITS = (5, 6, 3, 8, 4)
SLOTS, MOST_TOKENS = 4, 30
WIDE = LlamaConfig(
    vocab_size=199,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)


def rounded_like_stages(model: Any, bits: tuple[int, ...]) -> Any:
    """The whole model with every decoder linear replaced by what its codes stand for."""
    with torch.no_grad():
        for layer, layer_bits in zip(model.model.layers, bits, strict=True):
            for linear in (m for m in layer.modules() if isinstance(m, nn.Linear)):
                if layer_bits < 16:
                    linear.weight.copy_(dequantize(quantize(linear.weight, layer_bits)))
    return model


def test_quantized_stages_equal_the_model_with_rounded_weights(tmp_path: Path) -> None:
    model = rounded_like_stages(save_tiny(tmp_path, WIDE), MIXED_BITS)
    prompts = random_prompts((5, 12, 9))
    weight_only = Processor(instruction_sets=frozenset())
    stages = stages_of(tmp_path, (0, 2, LAYERS), 3, MOST_TOKENS, MIXED_BITS, processor=weight_only)
    expected = references(model, prompts, 12)
    assert generate(stages, prompts, 12, prefill=2, decode=3) == expected


class _Host:
    """As much of a planner's device as the byte rules ask for."""

    processor = Processor()


@pytest.mark.parametrize("name", ["llama", "llama-tied", "opt", "opt-post-norm", "bloom", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "kv_bits"),
    [("float32", 16), pytest.param("bfloat16", 16, marks=pytest.mark.rare), ("bfloat16", 8)],
)
def test_bytes_held_are_the_planner_rule_to_the_byte(
    name: str, dtype: str, kv_bits: int, tmp_path: Path
) -> None:
    save_tiny(tmp_path, CONFIGS[name])
    shape = model_shape(tmp_path)
    workload = Workload(SLOTS, MOST_TOKENS - 10, 10)
    stages = stages_of(
        tmp_path, (0, 2, LAYERS), SLOTS, MOST_TOKENS, MIXED_BITS, dtype, kv_bits=kv_bits
    )
    for j, stage in enumerate(stages):
        stats, layers = stage.stats(), stage.spec.layers
        assert stats.weight_bytes == planned_weight_bytes(
            shape, j, [MIXED_BITS[i] for i in layers], dtype
        )
        per_layer = kv_cache_bytes_per_layer(shape, workload, kv_bits, dtype)
        assert stats.kv_cache_bytes == len(layers) * per_layer


def planned_weight_bytes(shape: ModelShape, stage: int, bits: list[int], dtype: str) -> int:
    """Weights of the first (0) or last (1) of two stages."""
    device: Any = _Host()
    layers = sum(layer_weight_bytes(shape, b, device, dtype) for b in bits)
    if stage == 0:
        return layers + embedding_bytes(shape, dtype)
    return layers + norm_bytes(shape, dtype) + head_bytes(shape, dtype)


def test_tied_head_on_a_single_stage_is_held_once(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama-tied"])
    shape = model_shape(tmp_path)
    (stage,) = stages_of(tmp_path, (0, LAYERS), SLOTS, MOST_TOKENS)
    assert stage.stats().weight_bytes == shape.total_parameters * 4


def test_stage_beyond_its_limit_says_so(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    (stage,) = stages_of(tmp_path, (0, LAYERS), SLOTS, MOST_TOKENS)
    stats = stage.stats()
    needed = stats.weight_bytes + stats.kv_cache_bytes
    for limit, fits in ((needed, True), (needed - 1, False)):
        spec = replace(stage.spec, memory_limit_bytes=limit, device_name="node0/T4-16GB:0")
        if fits:
            Stage(spec, tmp_path, torch.device("cpu"), Processor())
            continue
        with pytest.raises(DeviceError, match=rf"{limit} bytes") as caught:
            Stage(spec, tmp_path, torch.device("cpu"), Processor())
        assert "node0/T4-16GB:0" in str(caught.value)


def test_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, WIDE)
    CONFIGS["llama"].save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        stages_of(tmp_path, (0, LAYERS), SLOTS, MOST_TOKENS)
