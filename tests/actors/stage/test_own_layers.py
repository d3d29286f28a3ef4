"""Layers by kernels of our own: against transformers' modules, and the kernels against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.stage.own_layers import own_layers
from tests.actors.models import LAYERS, generate, random_prompts, save_tiny, stages_of
from tests.actors.own_kernels import (
    WITH_OWN_LAYERS,
    use_own_kernels,
    with_wide_heads,
)
from tests.cuda_emulation import needs_compiler

HALF, BFLOAT = torch.float16, torch.bfloat16
NARROW, WIDE = (48, 16, HALF, False), (1048, 80, BFLOAT, True)
"""Width, head size, type and whether keys and values are codes: less than a block's threads take at
once, and more."""

FORMS = [
    *(NARROW, WIDE),
    *(
        pytest.param(form, marks=pytest.mark.rare)
        for form in ((4096, 128, HALF, True), (8, 8, BFLOAT, False), (2064, 256, HALF, False))
    ),
]
PROMPTS = random_prompts((5, 11, 1, 8))
NEW_TOKENS = 6


def draws(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_rounded(found: Tensor, exact: Tensor, roundings: float = 1) -> None:
    """Off by so many roundings to the type at most, and those of sums in float32."""
    eps = torch.finfo(found.dtype).eps / 2
    limit = roundings * eps * exact.abs() + 4e-6 * exact.abs().max()
    if found.dtype == HALF:
        limit += 2.0**-25  # half of its least step
    error = (found.double() - exact).abs()
    assert (error <= limit).all(), float((error / limit).max())


# --- Whole steps.


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
