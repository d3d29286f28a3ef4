"""Attention on a CPU, against float64 and PyTorch's own."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from numba.core.event import install_recorder
from torch import Tensor
from torch.nn import functional

from actors.attention import cpu
from actors.attention.addresses import Scoring
from actors.attention.cpu import (
    QUERIES_AT_ONCE,
    attend_fresh,
    attend_in_place,
    can_attend,
    prefers_blocks,
    warm_up,
)
from actors.attention.stored import Stored, quantized
from actors.messages import MicroBatch
from quant import numba_loops
from tests.actors.batches import batch_in_ranges
from tests.actors.configs import CONFIGS
from tests.actors.models import generate, random_prompts, save_tiny, stages_of


@pytest.mark.parametrize("tokens", [1, 48, QUERIES_AT_ONCE, QUERIES_AT_ONCE + 1, 150])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("size", [1.0, 8.0])
def test_prompts_against_float64(tokens: int, heads: int, kv_heads: int, size: float) -> None:
    draw = torch.Generator().manual_seed(tokens)
    query = (size * torch.randn(tokens, heads, 16, generator=draw)).bfloat16().transpose(0, 1)
    key = torch.randn(tokens, kv_heads, 16, generator=draw).bfloat16().transpose(0, 1)
    value = torch.randn(tokens, kv_heads, 16, generator=draw).bfloat16().transpose(0, 1)
    expected = functional.scaled_dot_product_attention(
        query.double()[None],
        key.double()[None],
        value.double()[None],
        is_causal=True,
        scale=0.3,
        enable_gqa=True,
    )[0]
    found = attend_fresh(query, key, value, 0.3)
    assert found.shape == query.shape
    bound = 2.0**-7 * float(value.abs().max())  # shares and result, each rounded to bfloat16
    assert float((found - expected).abs().max()) < bound


def test_values_that_are_not_finite_stay_so() -> None:
    ones = torch.ones(2, 64, 8, dtype=torch.bfloat16)
    bad = ones.clone()
    bad[:, 10] = float("nan")
    found = attend_fresh(ones, bad, ones, 1.0)
    assert not found[:, 10:].isfinite().any()  # nor need those before be: it is one request


@pytest.mark.parametrize("has_tiles", [False, True])
def test_what_is_left_to_pytorch(has_tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_matrix_tiles", lambda: has_tiles)
    monkeypatch.setattr(cpu, "emulates", lambda *_: False)
    long = torch.zeros(1, 2, 64, 8)
    assert prefers_blocks(long.bfloat16()) is not has_tiles
    assert not prefers_blocks(long)
    assert not prefers_blocks(long[:, :, :5].bfloat16())
    assert not prefers_blocks(long.bfloat16().to("meta"))
    monkeypatch.setattr(cpu, "emulates", lambda *_: True)
    assert not prefers_blocks(long.bfloat16())


SCALE = 0.21
ROOM = 80
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Twice the spacing of the type at the values' size, and float32 summation."""


def asked(
    query: Tensor, lengths: list[int], window: int | None, slopes: Tensor | None
) -> tuple[Tensor, MicroBatch, Scoring]:
    """Requests in ranges from the last one down, the newest token of each already stored."""
    slots = np.arange(len(lengths))[::-1].copy()
    starts = np.array(lengths) - 1
    batch = batch_in_ranges(slots, starts, np.ones_like(starts), slot_tokens=ROOM)
    return query, batch, Scoring(SCALE, window, slopes)


def in_store(requests: Tensor) -> Tensor:
    """Keys of requests `[requests, kv_heads, ROOM, head_dim]` as they lie in the cache."""
    return requests.transpose(0, 1).flatten(1, 2).contiguous()


def in_double(
    query: Tensor, batch: MicroBatch, scoring: Scoring, keys: Tensor, values: Tensor
) -> Tensor:
    """PyTorch's product with an explicit mask, in float64."""
    positions, lengths = torch.arange(keys.shape[2]), torch.from_numpy(batch.lengths)[:, None]
    visible = positions < lengths
    if scoring.window is not None:
        visible &= positions >= lengths - scoring.window
    heads = query.shape[1]
    slopes = torch.zeros(heads) if scoring.alibi_slopes is None else scoring.alibi_slopes
    bias = (slopes[:, None] * positions).double().expand(len(visible), -1, -1)
    out = functional.scaled_dot_product_attention(
        query.double()[:, :, None],
        keys[batch.slots].double(),
        values[batch.slots].double(),
        attn_mask=bias.masked_fill(~visible[:, None], -torch.inf)[:, :, None],
        scale=SCALE,
        enable_gqa=True,
    )
    return out[:, :, 0]


@pytest.mark.parametrize(("dtype", "kv_bits"), [*((d, 16) for d in ROUNDING), (torch.float32, 8)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 20), (8, 1, 128)])
@pytest.mark.parametrize("lengths", [[33] * 5, [1, 70, 2, 33, 17], [1]])
@pytest.mark.parametrize("window", [None, pytest.param(1, marks=pytest.mark.rare), 8])
@pytest.mark.parametrize("alibi", [False, True])
def test_decode_against_float64(
    dtype: torch.dtype,
    kv_bits: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    lengths: list[int],
    window: int | None,
    alibi: bool,
) -> None:
    torch.manual_seed(0)
    shape = (len(lengths), kv_heads, ROOM, head_dim)
    keys, values = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    query = torch.randn(len(lengths), heads, head_dim).to(dtype)
    question = asked(query, lengths, window, torch.rand(heads) if alibi else None)
    held = [Stored(in_store(numbers)) for numbers in (keys, values)]
    if kv_bits == 8:
        held = [Stored(*quantized(each.numbers)) for each in held]
    out = attend_in_place(*question, *held)
    assert out.dtype == dtype
    whole = [each.read(lambda t: t, torch.float64).unflatten(1, (-1, ROOM)) for each in held]
    exact = in_double(*question, *(each.transpose(0, 1) for each in whole))
    torch.testing.assert_close(out.double(), exact, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


def test_scores_far_apart_leave_one_token() -> None:
    """Powers of e that no float32 holds become nothing, not NaN."""
    keys = torch.zeros(1, 3, 8)
    keys[0, 1] = 1e4
    values = torch.arange(24.0).view(1, 3, 8)
    out = attend_in_place(
        *asked(torch.ones(1, 1, 8), [3], None, None), Stored(keys), Stored(values)
    )
    torch.testing.assert_close(out[0, 0], values[0, 1])


def test_what_lies_beyond_a_request_is_not_read() -> None:
    stored = torch.full((1, 4, 8), torch.nan)
    stored[:, :2] = 1.0
    out = attend_in_place(
        *asked(torch.ones(1, 1, 8), [2], None, None), Stored(stored), Stored(stored)
    )
    torch.testing.assert_close(out, torch.ones(1, 1, 8))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_values_that_are_not_finite_are_seen(bad: float, kv_bits: int) -> None:
    """An overflow must reach the sampler, which reports it."""
    numbers = torch.ones(1, 4, 8)
    numbers[0, 1, 1 if kv_bits == 8 else slice(None)] = bad
    stored = Stored(*quantized(numbers)) if kv_bits == 8 else Stored(numbers)
    out = attend_in_place(*asked(torch.ones(1, 1, 8), [3], None, None), stored, stored)
    assert not out.isfinite().any()


def test_without_numba_one_message_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numba_loops.has_numba.cache_clear()
    monkeypatch.setattr(numba_loops, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        warm_up(torch.float32)
        assert not can_attend(torch.zeros(1))
    assert [record.message for record in caplog.records] == [
        "computing on this CPU is several times slower without numba: pip install numba"
    ]
    numba_loops.has_numba.cache_clear()


@pytest.mark.parametrize(
    ("name", "kv_bits"),
    [
        ("bloom", 16),
        pytest.param("llama", 8, marks=pytest.mark.rare),
        pytest.param("llama", 16, marks=pytest.mark.rare),
    ],
)
def test_the_first_token_finds_its_loop_compiled(
    name: str, kv_bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu._kernel.cache_clear()  # of other tests
    monkeypatch.setattr(cpu, "compiled_loop", numba_loops.compiled_loop)  # shared with no process
    save_tiny(tmp_path, CONFIGS[name])
    stages = stages_of(tmp_path, (0, 3, 5), slots=4, max_tokens=32, kv_bits=kv_bits)
    with install_recorder("numba:compile") as compiled:
        generate(stages, random_prompts((5, 3)), new_tokens=4, prefill=2, decode=2)
    assert compiled.buffer == []


def test_kinds_of_caches_that_it_leaves_to_pytorch() -> None:
    assert not can_attend(torch.zeros(1, dtype=torch.float64))
    assert not can_attend(torch.zeros(1, device="meta"))
