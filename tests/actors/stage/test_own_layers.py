"""Layers by kernels of our own: stages' tokens are those of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch

from actors.attention.kv_cache import CacheForm
from actors.stage.layer_cache import make_cache
from actors.stage.layers import cuda_layer
from actors.stage.layers.own_layers import own_layers, put_own_layers
from actors.stage.partial_model import empty_model
from actors.stage.stage import Stage
from quant.backends.cuda.driver import Kernels
from quant.devices import local_processor
from tests.actors.configs import CONFIGS, LAYERS, MORE_CONFIGS
from tests.actors.models import generate, random_prompts, save_tiny, specs_of, stages_of
from tests.actors.own_kernels import (
    WITH_OWN_LAYERS,
    use_own_kernels,
    with_wide_heads,
)
from tests.actors.thread_ranks import divided
from tests.cuda_emulation import CPU, needs_compiler

HALF = torch.float16
PROMPTS = random_prompts((5, 11, 1, 8))
NEW_TOKENS = 6


def rounded_model(model: Any, dtype: torch.dtype) -> Any:
    """`model` with its weights rounded to the type, in float32."""
    return model.to(dtype).float()


def check_tokens(model: Any, tokens: list[list[int]], loss: float) -> None:
    """Every token is the one that transformers would choose, or scores less by its rounding."""
    for prompt, new in zip(PROMPTS, tokens, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(new)[:, None])[:, 0]
        spread = logits.std(-1)
        assert (logits.amax(-1) - chosen <= loss * spread).all()


LOSS = {(16, "float16"): 0.01, (8, "float16"): 0.1, (16, "bfloat16"): 0.08, (8, "bfloat16"): 0.15}
"""By which the token of a rounded step may score less than the best one, of logits' spread."""


@needs_compiler
@pytest.mark.parametrize(
    ("name", "dtype", "kv_bits"),
    [
        *((name, "float16", 16) for name in ("llama", "qwen3", "gpt_neox", "opt", "bloom")),
        *(
            pytest.param(name, dtype, kv_bits, marks=pytest.mark.rare)
            for name in WITH_OWN_LAYERS
            for dtype in ("float16", "bfloat16")
            for kv_bits in (16, 8)
        ),
    ],
)
def test_tokens_are_those_of_generate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, dtype: str, kv_bits: int
) -> None:
    """Prompts, parts of micro-batches with both, decode steps."""
    model = rounded_model(save_tiny(tmp_path, with_wide_heads(name)), getattr(torch, dtype))
    use_own_kernels(monkeypatch)
    stages = stages_of(tmp_path, (0, 2, LAYERS), 4, 20, dtype=dtype, kv_bits=kv_bits)
    assert [len(own_layers(stage._model)) for stage in stages] == [2, LAYERS - 2]
    tokens = generate(stages, PROMPTS, NEW_TOKENS, prefill=2, decode=3)
    check_tokens(model, tokens, LOSS[kv_bits, dtype])


@needs_compiler
@pytest.mark.rare
@pytest.mark.parametrize("name", ["llama", "opt", "bloom"])
def test_ranks_compute_their_heads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Of a stage that is divided; biases of what is summed are added once."""
    values = CONFIGS[name].to_dict() | {"hidden_size": 64}
    values |= {"n_head" if name == "bloom" else "num_attention_heads": 4}
    values |= {"num_key_value_heads": 2} if name == "llama" else {"word_embed_proj_dim": 64}
    values.pop("head_dim", None)
    model = rounded_model(save_tiny(tmp_path, type(CONFIGS[name]).from_dict(values)), HALF)
    use_own_kernels(monkeypatch)
    launch, lock = Kernels.launch, Lock()

    def one_at_a_time(*arguments: Any) -> None:
        with lock:  # ranks are threads here, and the emulator is one
            launch(*arguments)

    monkeypatch.setattr(Kernels, "launch", one_at_a_time)
    specs = specs_of((0, 2, LAYERS), 4, 20, dtype="float16")
    with divided(specs, (2, 1), tmp_path) as stages:
        assert own_layers(stages[0]._model)
        tokens = generate(stages, PROMPTS, NEW_TOKENS, prefill=2, decode=3)
    check_tokens(model, tokens, LOSS[16, "float16"])


@needs_compiler
def test_a_layer_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_tiny(tmp_path, with_wide_heads("llama"))
    use_own_kernels(monkeypatch)
    monkeypatch.setitem(cuda_layer._ACTIVATIONS, "SiLUActivation", 3)
    with pytest.warns(RuntimeWarning, match=r"a layer is off by .*transformers' modules take"):
        stages = stages_of(tmp_path, (0, LAYERS), 4, 20, dtype="float16")
    assert not own_layers(stages[0]._model)
    monkeypatch.setitem(cuda_layer._ACTIVATIONS, "SiLUActivation", 0)
    opt = tmp_path / "opt"
    save_tiny(opt, with_wide_heads("opt-post-norm"))
    assert not own_layers(stages_of(opt, (0, LAYERS), 4, 20, dtype="float16")[0]._model)


@pytest.mark.parametrize("name", sorted({*MORE_CONFIGS} - {*WITH_OWN_LAYERS}))
def test_layers_of_other_orders_are_left_to_transformers(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    use_own_kernels(monkeypatch)
    model = empty_model(copy.deepcopy(MORE_CONFIGS[name]))
    layers = range(LAYERS)
    cache = make_cache(model.config, layers, 8, CacheForm(HALF, CPU))
    put_own_layers(model, layers, cache, HALF)
    assert not own_layers(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", WITH_OWN_LAYERS)
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_tokens_on_a_gpu(tmp_path: Path, name: str, kv_bits: int) -> None:
    model = rounded_model(save_tiny(tmp_path, with_wide_heads(name)), HALF)
    device = torch.device("cuda")
    stages = [
        Stage(spec, tmp_path, device, local_processor(device))
        for spec in specs_of((0, 2, LAYERS), 4, 20, dtype="float16", kv_bits=kv_bits)
    ]
    assert [len(own_layers(stage._model)) for stage in stages] == [2, LAYERS - 2]
    tokens = generate(stages, PROMPTS, NEW_TOKENS, prefill=2, decode=3)
    check_tokens(model, tokens, LOSS[kv_bits, "float16"])
