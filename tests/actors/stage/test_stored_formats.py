"""Stages of quantized checkpoints against `generate` with the weights that they stand for: token
for token in float32, on three stages, and on groups of two devices.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from actors.stage.stage import Stage
from llmpq.model_check import checked_shape, stored_note
from planner.costs.stored_bytes import layer_weight_bytes
from quant.linear import QuantizedLinear
from quant.loading.cache_settings import CacheSettings
from quant.loading.loader import module_nbytes
from quant.rounding.canonical import dequantize, quantize
from quant.scheme import Processor
from tests.actors.configs import EVERY_CONFIG, LAYERS
from tests.actors.models import generate, random_prompts, references, save_tiny, specs_of
from tests.actors.thread_ranks import divided
from tests.quant.adapters import adapter_tensors, merge, save_adapter
from tests.quant.stored_formats import FORMATS, store

HERE: Any = SimpleNamespace(processor=Processor(instruction_sets=frozenset()))
"""As much of a planner's device as byte rules ask for: that of `divided`."""

LENGTHS, NEW_TOKENS = (5, 11, 1, 8), 8
LIBRARY = {"int4", "int8", "float8", "modelopt"}
USUAL = {(form, "qwen2") for form in ("gptq", "nf4", "int8")}
USUAL |= {("awq", "deepseek_v3"), ("fp8", "qwen3_moe")}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        pytest.param(form, name, marks=() if (form, name) in USUAL else pytest.mark.rare)
        for form in FORMATS
        for name in ("qwen2", "qwen3_moe", "deepseek_v3")
    ],
)
def test_greedy_tokens_equal_generate(form: str, name: str, tmp_path: Path) -> None:
    if form in LIBRARY:
        pytest.importorskip("compressed_tensors")
    save_tiny(tmp_path, EVERY_CONFIG[name])
    plain = store(tmp_path, form)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    prompts, bits = random_prompts(LENGTHS), FORMATS[form][2]
    expected = references(model, prompts, NEW_TOKENS)
    shape = checked_shape(tmp_path)
    assert (16 if shape.stored is None else shape.stored.bits) == bits
    kept = "codes are kept" if bits < 16 else "they are decoded"
    assert kept in (stored_note(shape) or "")
    for bounds, degrees in (((0, 1, 3, LAYERS), (1, 2, 1)), ((0, LAYERS), (2,))):
        specs = specs_of(bounds, len(prompts), max(LENGTHS) + NEW_TOKENS, bits)
        with divided(specs, degrees, tmp_path) as stages:
            assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3) == expected
            packed = [m for m in stages[0]._model.modules() if isinstance(m, QuantizedLinear)]
            assert bool(packed) == (bits < 16)


@pytest.mark.parametrize(
    ("form", "bits"),
    [
        ("awq", (4, 4, 16, 16, 16)),
        ("awq", (4, 8, 8, 4, 8)),
        pytest.param("awq", (3, 3, 16, 4, 4), marks=pytest.mark.rare),
        pytest.param("int8", (8, 8, 16, 4, 4), marks=pytest.mark.rare),
    ],
)
@pytest.mark.parametrize("name", ["qwen2", pytest.param("qwen3_moe", marks=pytest.mark.rare)])
def test_layers_have_their_codes_or_other_bits(
    form: str, bits: tuple[int, ...], name: str, tmp_path: Path
) -> None:
    """Tokens are those of `generate` where each weight is what its codes stand for, or is rounded
    from that; bytes are those of plans.
    """
    save_tiny(tmp_path, EVERY_CONFIG[name])
    plain, stored = store(tmp_path, form), FORMATS[form][2]
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    rounded = [layer for layer, own in enumerate(bits) if own not in (stored, 16)]
    with torch.no_grad():
        for layer in rounded:
            for linear in model.get_submodule(f"model.layers.{layer}").modules():
                round_to(linear, bits[layer])
    prompts = random_prompts(LENGTHS)
    expected = references(model, prompts, NEW_TOKENS)
    shape = checked_shape(tmp_path)
    for degrees in ((1, 1), (1, 2)):
        specs = specs_of((0, 2, LAYERS), len(prompts), max(LENGTHS) + NEW_TOKENS, bits)
        with divided(specs, degrees, tmp_path) as stages:
            assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3) == expected
            for stage, degree in zip(stages, degrees, strict=True):
                if degree == 1:
                    held = [module_nbytes(layer) for layer in layers_of(stage)]
                    assert held == [
                        layer_weight_bytes(shape.layer(i), bits[i], HERE, "float32")
                        for i in stage.spec.layers
                    ]


@pytest.mark.parametrize("name", ["qwen2", pytest.param("qwen3_moe", marks=pytest.mark.rare)])
def test_weights_that_an_adapter_changes_are_rounded_again(name: str, tmp_path: Path) -> None:
    """To the bits that they are stored with; the others keep their codes."""
    base, targets = tmp_path / "base", ("q_proj", "down_proj")
    save_tiny(base, EVERY_CONFIG[name])
    model = AutoModelForCausalLM.from_pretrained(store(base, "awq"), dtype=torch.float32).eval()
    prompts, tensors = random_prompts(LENGTHS), adapter_tensors(model, targets, 4)
    adapter = str(save_adapter(tmp_path / "adapter", tensors, 4))
    before = references(model, prompts, NEW_TOKENS)
    merge(model, tensors, 4.0)
    with torch.no_grad():
        for place, linear in model.named_modules():
            if place.startswith("model.layers") and place.endswith(targets):
                round_to(linear, 4)
    expected = references(model, prompts, NEW_TOKENS)
    assert expected != before
    (spec,) = specs_of((0, LAYERS), len(prompts), max(LENGTHS) + NEW_TOKENS, 4, adapter=adapter)
    cache = CacheSettings(tmp_path / "cache")
    for _ in range(2):
        stage = Stage(spec, base, torch.device("cpu"), HERE.processor, cache)
        assert generate([stage], prompts, NEW_TOKENS, prefill=2, decode=3) == expected
    assert len([*(tmp_path / "cache").rglob("*.safetensors")]) == LAYERS


def layers_of(stage: Stage) -> list[nn.Module]:
    every = stage._model.get_decoder().layers
    return [every[layer] for layer in stage.spec.layers]


def round_to(module: nn.Module, bits: int) -> None:
    """Round the weights of a linear, or of experts, as a plan of so many bits does."""
    if isinstance(module, nn.Linear) and module.out_features > 8:
        module.weight.copy_(dequantize(quantize(module.weight, bits)))
    for fused in ("gate_up_proj", "down_proj"):
        weights = getattr(module, fused, None)
        if isinstance(weights, nn.Parameter):
            weights.copy_(torch.stack([dequantize(quantize(each, bits)) for each in weights]))
