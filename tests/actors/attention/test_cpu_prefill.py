"""Attention of fresh prompts in blocks of queries, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from actors.attention import cpu_prefill
from actors.attention.cpu_prefill import QUERIES_AT_ONCE, attend_fresh, prefers_blocks


@pytest.mark.parametrize("tokens", [1, 48, QUERIES_AT_ONCE, QUERIES_AT_ONCE + 1, 150])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("size", [1.0, 8.0])
def test_against_float64(tokens: int, heads: int, kv_heads: int, size: float) -> None:
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
    monkeypatch.setattr(cpu_prefill, "has_matrix_tiles", lambda: has_tiles)
    long = torch.zeros(1, 2, 64, 8)
    assert prefers_blocks(long.bfloat16()) is not has_tiles
    assert not prefers_blocks(long)
    assert not prefers_blocks(long[:, :, :5].bfloat16())
    assert not prefers_blocks(long.bfloat16().to("meta"))
