"""Stages that keep codes of GGUF files, against `generate` with the weights that they stand for:
token for token in float32, on one stage, on three, and on groups of two devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, Qwen3MoeConfig

from llmpq.model_check import checked_shape, stored_note
from quant.checkpoint.model_reference import resolve
from quant.checkpoint.reader import Checkpoint
from quant.linear import QuantizedLinear
from quant.rounding.canonical import dequantize, quantize
from tests.actors.configs import LAYERS
from tests.actors.models import generate, random_prompts, references, save_tiny, specs_of
from tests.actors.thread_ranks import divided
from tests.quant.checkpoint.gguf.blocks import in_blocks
from tests.quant.checkpoint.gguf.test_gguf_weights import small_llama
from tests.quant.checkpoint.gguf.written import write_gguf

LENGTHS, NEW_TOKENS = (5, 11, 1, 8), 8
EXPERTS = Qwen3MoeConfig(
    vocab_size=199, hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=2,
    moe_intermediate_size=32, norm_topk_prob=True, max_position_embeddings=128,
)  # fmt: skip
BESIDE = ("attn_v", "ffn_down")
SOME = ("0.attn_v", "0.ffn_down", "4.attn_v", "4.ffn_down")
"""As in files of Q4_K_M, of whose layers half have more bits for these."""


def as_read(model: Any, checkpoint: Checkpoint) -> Any:
    """`model` with the numbers of the file, those beside codes rounded to 8 bit in rows."""
    tensors = {}
    for name in checkpoint.names():
        weight = checkpoint.read(name).clone().float()
        is_beside = checkpoint.stored_bits(name.removesuffix(".weight")) == 8
        tensors[name] = dequantize(quantize(weight, 8)) if is_beside else weight
    for name in model.state_dict():
        stem, _, part = name.rpartition(".")
        if part in ("gate_up_proj", "down_proj"):
            count = len(model.state_dict()[name])
            parts = part.replace("gate_up", "gate,up").removesuffix("_proj").split(",")
            each = [
                [tensors.pop(f"{stem}.{i}.{p}_proj.weight") for p in parts] for i in range(count)
            ]
            tensors[name] = torch.stack([torch.cat(own) for own in each])
    model.load_state_dict(tensors)
    return model


def model_of(folder: Path, config: PretrainedConfig | int) -> Any:
    return small_llama(folder, config) if isinstance(config, int) else save_tiny(folder, config)


@pytest.mark.parametrize(
    ("kind", "config", "others", "beside"),
    [
        ("Q4_0", EXPERTS, "F16", ()),
        pytest.param("Q4_1", 64, "Q8_0", BESIDE, marks=pytest.mark.rare),
        pytest.param("Q4_1", EXPERTS, "Q8_0", BESIDE, marks=pytest.mark.rare),
        ("Q4_K", 256, "Q6_K", SOME),
        ("Q5_1", 64, "Q8_0", ()),
    ],
)
def test_greedy_tokens_equal_generate(
    kind: str, config: PretrainedConfig | int, others: str, beside: tuple[str, ...], tmp_path: Path
) -> None:
    model = model_of(tmp_path / "original", config)
    bits = int(kind[1])
    file = write_gguf(model, tmp_path / "tiny.gguf", in_blocks(kind, others, beside))
    model, prompts = as_read(model, Checkpoint(file)), random_prompts(LENGTHS)
    expected = references(model, prompts, NEW_TOKENS, ignore_eos=True)
    shape = checked_shape(file)
    assert shape.stored is not None
    assert (shape.stored.bits, shape.stored.group_size) == (bits, 32)
    note = f"tiny: weights are stored as {bits} bit (GGUF {kind})"
    more = 6 if others == "Q6_K" else 8
    also = f", beside linears of {more} bits" if beside else ""
    assert (stored_note(shape) or "").startswith(note + also)
    assert len(shape.kind_shapes) == (2 if beside == SOME else 1)
    for bounds, degrees in (
        ((0, LAYERS), (1,)),
        ((0, 1, 3, LAYERS), (1, 2, 1)),
        ((0, LAYERS), (2,)),
    ):
        specs = specs_of(bounds, len(prompts), max(LENGTHS) + NEW_TOKENS, bits)
        with divided(specs, degrees, resolve(file)) as stages:
            assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3) == expected
            packed = [m for m in stages[0]._model.modules() if isinstance(m, QuantizedLinear)]
            assert {each.bits for each in packed} == ({4, more} if beside else {bits})


def test_layers_of_other_bits_are_rounded_from_the_numbers(tmp_path: Path) -> None:
    model, bits = small_llama(tmp_path / "original", 64), (4, 8, 16, 3, 4)
    file = write_gguf(model, tmp_path / "tiny.gguf", in_blocks("Q4_1"))
    model = as_read(model, Checkpoint(file))
    with torch.no_grad():
        for layer, own in enumerate(bits):
            for linear in model.model.layers[layer].modules():
                if isinstance(linear, torch.nn.Linear) and own in (3, 8):
                    linear.weight.copy_(dequantize(quantize(linear.weight, own)))
    prompts = random_prompts(LENGTHS)
    specs = specs_of((0, LAYERS), len(prompts), max(LENGTHS) + NEW_TOKENS, bits)
    with divided(specs, (1,), resolve(file)) as stages:
        found = generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3)
    assert found == references(model, prompts, NEW_TOKENS, ignore_eos=True)
