"""Stages of quantized checkpoints against `generate` with the weights that they stand for: token
for token in float32, on one stage, on three, and on groups of two devices.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmpq.model_check import checked_shape, stored_note
from quant.linear import QuantizedLinear
from tests.actors.configs import EVERY_CONFIG, LAYERS
from tests.actors.models import generate, random_prompts, reference, save_tiny, specs_of
from tests.actors.thread_ranks import divided
from tests.quant.stored_formats import FORMATS, store

LENGTHS, NEW_TOKENS = (5, 11, 1, 8), 8
LIBRARY = {"int4", "int8", "float8"}
USUAL = {(form, "qwen2") for form in ("awq", "nf4", "int8")}
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
    expected = [reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    shape = checked_shape(tmp_path)
    assert (16 if shape.stored is None else shape.stored.bits) == bits
    kept = "codes are kept" if bits < 16 else "they are decoded"
    assert kept in (stored_note(shape) or "")
    for bounds, degrees in (
        ((0, LAYERS), (1,)),
        ((0, 1, 3, LAYERS), (1, 2, 1)),
        ((0, LAYERS), (2,)),
    ):
        specs = specs_of(bounds, len(prompts), max(LENGTHS) + NEW_TOKENS, bits)
        with divided(specs, degrees, tmp_path) as stages:
            assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3) == expected
            packed = [m for m in stages[0]._model.modules() if isinstance(m, QuantizedLinear)]
            assert bool(packed) == (bits < 16)
