"""Stages of different dtypes: hidden states are converted once, to the type of the receiver."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.messages import MicroBatch, Sampled
from actors.stage.stage import Stage
from actors.transport.message_format import decode, encode
from quant.scheme import Processor
from tests.actors.batches import batch_in_ranges
from tests.actors.configs import CONFIGS, LAYERS
from tests.actors.local_pipeline import LocalPipeline
from tests.actors.models import generate, random_prompts, references, save_tiny, stages_of

DTYPES = ("float32", "float16", "bfloat16")
SPLIT = 2
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def mixed_stages(folder: Path, first: str, last: str, head_on_first: bool = False) -> list[Stage]:
    plain = stages_of(folder, (0, SPLIT, LAYERS), 3, 20, head_on_first=head_on_first)
    return [
        Stage(replace(stage.spec, dtype=dtype), folder, torch.device("cpu"), Processor())
        for stage, dtype in zip(plain, (first, last), strict=True)
    ]


def a_prefill(prompts: list[tuple[int, ...]]) -> tuple[MicroBatch, Tensor]:
    counts = np.array([len(prompt) for prompt in prompts])
    batch = batch_in_ranges(np.arange(len(prompts)), np.zeros_like(counts), counts, slot_tokens=20)
    return batch, torch.tensor([token for prompt in prompts for token in prompt])


@torch.inference_mode()
def layers_by_hand(
    model: torch.nn.Module, prompt: tuple[int, ...], first: str, last: str
) -> Tensor:
    """The library's own forward with everything of the first layers in one type and of the last in
    another: final hidden state of the last token.
    """
    first_dtype, last_dtype = getattr(torch, first), getattr(torch, last)
    decoder = model.model
    decoder.embed_tokens.to(first_dtype)
    decoder.norm.to(last_dtype)
    for index, layer in enumerate(decoder.layers):
        layer.to(first_dtype if index < SPLIT else last_dtype)
    length = len(prompt)
    hidden = decoder.embed_tokens(torch.tensor([prompt]))
    positions = torch.arange(length)[None]
    causal = torch.full((length, length), -torch.inf).triu(1)[None, None]
    for index, layer in enumerate(decoder.layers):
        dtype = first_dtype if index < SPLIT else last_dtype
        hidden = hidden.to(dtype)
        rotation = decoder.rotary_emb(hidden, positions)
        hidden = layer(
            hidden, attention_mask=causal.to(dtype), position_embeddings=rotation,
            position_ids=positions,
        )  # fmt: skip
    return decoder.norm(hidden)[0, -1]


@pytest.mark.parametrize(("first", "last"), list(permutations(DTYPES, 2)))
def test_two_types_in_a_row_are_the_layers_by_hand(first: str, last: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS["llama"])
    prompts = random_prompts((7, 4, 9))
    stages = mixed_stages(tmp_path, first, last, head_on_first=True)
    batch, tokens = a_prefill(prompts)
    sent = stages[0].step(batch, tokens)
    assert isinstance(sent, Tensor)
    assert sent.dtype == getattr(torch, first)
    arrived = decode(encode(batch, sent))
    assert not isinstance(arrived, Sampled)
    assert torch.equal(arrived[1], sent)
    found = stages[1].step(*arrived)
    assert isinstance(found, Tensor)
    assert found.dtype == getattr(torch, last)
    assert torch.equal(found, stages[1].step(batch, sent.to(found.dtype)))
    rounding = ROUNDING[first] + ROUNDING[last]
    for row, prompt in zip(found, prompts, strict=True):
        expected = layers_by_hand(model, prompt, first, last)
        assert expected.dtype == row.dtype
        error = (row - expected).double().norm() / expected.double().norm()
        assert error < 4 * rounding
    float32 = mixed_stages(tmp_path, "float32", "float32", head_on_first=True)
    exact = LocalPipeline(float32)._stages[1].step(batch, float32[0].step(batch, tokens))
    assert (exact.double() - found.double()).norm() > 0.1 * rounding * exact.double().norm()


@pytest.mark.parametrize("head_on_first", [False, True])
def test_float16_after_float32_generates_what_both_in_float32_do(
    head_on_first: bool, tmp_path: Path
) -> None:
    """Also the way back to a head on the first stage is converted."""
    model = save_tiny(tmp_path, CONFIGS["llama"])
    prompts = random_prompts((7, 4, 9))
    stages = mixed_stages(tmp_path, "float32", "float16", head_on_first)
    tokens = generate(stages, prompts, 8, prefill=2, decode=3)
    expected = references(model, prompts, 8)
    same = sum(a == b for mine, other in zip(tokens, expected, strict=True)
               for a, b in zip(mine, other, strict=False))  # fmt: skip
    assert same >= 0.8 * sum(map(len, expected))
