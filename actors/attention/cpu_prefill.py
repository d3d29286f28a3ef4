"""Attention of fresh prompts on a CPU: products of blocks of queries with the keys up to them.

PyTorch's flash kernel takes 1.5 to 2 times as long at head sizes of 64 and 128 on processors
without tiles for matrices (AMX), and half as long on those with them. Scores and their shares are
float32 in both.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch
from torch import Tensor

QUERIES_AT_ONCE = 64
"""The fastest of 64, 128 and 256 for prompts of 128 to 1,024 tokens: scores stay in the caches."""

_LEAST_TOKENS = 48
"""Shorter prompts are as fast in one call of the flash kernel."""


def prefers_blocks(query: Tensor) -> bool:
    """Whether `attend_fresh` should take prompts like `query` `[requests, heads, tokens, head_dim]`
    here.
    """
    on_cpu = query.device.type == "cpu" and query.dtype == torch.bfloat16
    return on_cpu and query.shape[2] >= _LEAST_TOKENS and not has_matrix_tiles()


@cache
def has_matrix_tiles() -> bool:
    """Whether this CPU multiplies matrices in tiles (AMX)."""
    return torch.cpu._is_amx_tile_supported()


def attend_fresh(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of one prompt.

    `query` `[heads, tokens, head_dim]`, `key` and `value` `[kv_heads, tokens, head_dim]`, 16-bit
    types; returns the query's shape and type.
    """
    heads, tokens, head_dim = query.shape
    kv_heads = key.shape[0]
    group = heads // kv_heads
    asked = (query.float() * scale).view(kv_heads, group, tokens, head_dim)
    keys = key.float().transpose(1, 2).contiguous()
    values = value.contiguous()
    out = torch.empty(kv_heads, group, tokens, head_dim, dtype=query.dtype)
    for first in range(0, tokens, QUERIES_AT_ONCE):
        end = min(first + QUERIES_AT_ONCE, tokens)
        rows = asked[:, :, first:end].reshape(kv_heads, -1, head_dim)
        scores = torch.bmm(rows, keys[:, :, :end]).view(kv_heads, group, end - first, end)
        scores[..., first:] += _later(end - first)
        shares = scores.softmax(-1).to(value.dtype).view(kv_heads, -1, end)
        out[:, :, first:end] = torch.bmm(shares, values[:, :end]).view(
            kv_heads, group, -1, head_dim
        )
    return out.view(heads, tokens, head_dim)


@lru_cache(maxsize=QUERIES_AT_ONCE)
def _later(queries: int) -> Tensor:
    """Minus infinity where a key comes after the query, `[queries, queries]`."""
    return torch.full((queries, queries), -math.inf).triu_(1)
