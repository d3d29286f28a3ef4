"""Stages of a model with an adapter merged while it is loaded, against `generate` on one that it
was added to by hand: token for token in float32.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.stage.stage import Stage
from quant.loading.cache_settings import CacheSettings
from quant.scheme import Processor
from tests.actors.configs import EVERY_CONFIG, LAYERS
from tests.actors.models import generate, random_prompts, references, save_tiny, specs_of
from tests.actors.thread_ranks import divided
from tests.quant.adapters import adapter_tensors, merge, save_adapter

LENGTHS, NEW_TOKENS, RANK = (5, 11, 1, 8), 8, 4
TARGETS = {
    "qwen2": ("q_proj", "v_proj", "down_proj"),
    "phi3": ("qkv_proj", "gate_up_proj", "o_proj"),
    "gpt_neox": ("query_key_value", "dense_4h_to_h"),
    "qwen3_moe": ("o_proj", "k_proj"),
    "deepseek_v3": ("q_proj", "kv_b_proj", "o_proj"),
}
USUAL = ("qwen2", "deepseek_v3")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in USUAL else pytest.mark.rare) for n in TARGETS]
)
def test_greedy_tokens_equal_generate(name: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "base", EVERY_CONFIG[name])
    tensors = adapter_tensors(model, TARGETS[name], RANK)
    adapter = str(save_adapter(tmp_path / "adapter", tensors, RANK))
    prompts = random_prompts(LENGTHS)
    base = references(model, prompts, NEW_TOKENS)
    merge(model, tensors, 16 / RANK)
    expected = references(model, prompts, NEW_TOKENS)
    assert expected != base
    for bounds, degrees in (((0, LAYERS), (1,)), ((0, 1, 3, LAYERS), (1, 2, 1))):
        specs = specs_of(bounds, len(prompts), max(LENGTHS) + NEW_TOKENS, adapter=adapter)
        with divided(specs, degrees, tmp_path / "base") as stages:
            assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3) == expected


def test_layers_from_the_cache_are_those_of_the_adapter(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "base", EVERY_CONFIG["qwen2"])
    tensors = adapter_tensors(model, TARGETS["qwen2"], RANK)
    adapter = str(save_adapter(tmp_path / "adapter", tensors, RANK))
    merge(model, tensors, 16 / RANK)
    model.save_pretrained(tmp_path / "merged")
    cache = CacheSettings(tmp_path / "cache")
    (spec,) = specs_of((0, LAYERS), 2, 24, 8)
    cases = {"base": None, "first": adapter, "again": adapter}
    found = {}
    for case, given in cases.items():
        own = replace(spec, adapter=given)
        stage = Stage(own, tmp_path / "base", torch.device("cpu"), Processor(), cache)
        found[case] = generate([stage], random_prompts((5, 7)), NEW_TOKENS, prefill=2, decode=2)
    merged = Stage(spec, tmp_path / "merged", torch.device("cpu"), Processor())
    by_hand = generate([merged], random_prompts((5, 7)), NEW_TOKENS, prefill=2, decode=2)
    assert found["first"] == found["again"] == by_hand != found["base"]
