"""Attention of a flattened micro-batch over per-request KV slots (ORCA's selective batching,
section 4.2).

Every operation but attention treats the new tokens of all requests as one long row. Here they part:
equal-length prefills and pure decodes run as one dense call, anything else request by request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from actors.attention.cpu_decode import DecodeQuery, attend_in_place, can_attend
from actors.attention.cpu_prefill import attend_fresh, prefers_blocks
from actors.attention.kv_cache import KVCache, SlotRows, Stored
from actors.messages import MicroBatch

RAGGED_ATTENTION = "llmpq_ragged"


@dataclass(frozen=True)
class RaggedContext:
    """The cache and the addresses that a pass through the stage's layers needs."""

    cache: KVCache
    batch: MicroBatch
    where: SlotRows

    @property
    def fresh_equal_prefill(self) -> bool:
        """Whether all requests bring the same number of tokens and have no past."""
        return self.where.equal_lengths and not self.batch.starts.any()


def attend(
    context: RaggedContext,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Store the new keys and values, then attend causally within each request.

    `query`: `[tokens, heads, head_dim]`; `key`, `value`: `[tokens, kv_heads, head_dim]`; returns
    `[tokens, heads, head_dim]`. `window` limits how many latest positions a token sees (itself
    included).
    """
    keys, values = context.cache.append(layer, context.where, key, value)
    if window is not None and window >= context.where.max_length:
        window = None
    mask_kind = _MaskKind(window, alibi_slopes, query.dtype)
    if context.batch.is_decode:
        if can_attend(keys.numbers):
            asked = DecodeQuery(query, context.where, scale, window, alibi_slopes)
            return attend_in_place(asked, keys, values)
        return _decode(context, query, keys, values, scale, mask_kind)
    if context.fresh_equal_prefill and mask_kind.is_plain:
        gather = context.where.gather
        if keys.scales is None:  # as they come: slots that lie apart would have to be copied
            key, value = _by_request(context, key), _by_request(context, value)
        else:
            key, value = keys.read(gather, query.dtype), values.read(gather, query.dtype)
        return _dense_prefill(context, query, key, value, scale)
    return _each_request(context, query, keys, values, scale, mask_kind)


@dataclass(frozen=True)
class _MaskKind:
    """What a mask must express beyond causality."""

    window: int | None
    alibi_slopes: Tensor | None
    dtype: torch.dtype

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.alibi_slopes is None

    def mask(self, query_positions: Tensor, key_count: int) -> Tensor:
        """Visible keys (boolean), or alibi bias with minus infinity where hidden.

        `query_positions`: `[requests, queries]`; returns `[requests, 1 or heads, queries,
        key_count]`.
        """
        keys = torch.arange(key_count, device=query_positions.device)
        distance = query_positions[:, None, :, None] - keys
        visible = distance >= 0
        if self.window is not None:
            visible &= distance < self.window
        if self.alibi_slopes is None:
            return visible
        bias = (self.alibi_slopes[:, None] * keys).to(self.dtype)[None, :, None, :]
        masked: Tensor = bias.masked_fill(~visible, -math.inf)
        return masked


def _attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Scaled dot product of `[requests, heads, tokens, head_dim]` with grouped keys and values.

    On CUDA only the flash kernel knows grouped heads, and it takes neither masks nor GPUs below
    8.0; the fallback would write out all scores in float32, so the heads are repeated for it
    instead.
    """
    if is_causal and prefers_blocks(query):
        prompts = zip(query, keys, values, strict=True)
        return torch.stack([attend_fresh(q, k, v, scale) for q, k, v in prompts])
    groups = query.shape[1] // keys.shape[1]
    if groups > 1 and query.is_cuda:
        flash = attn_mask is None and torch.cuda.get_device_capability(query.device) >= (8, 0)
        if not flash or query.dtype == torch.float32:
            keys, values = (t.repeat_interleave(groups, dim=1) for t in (keys, values))
            groups = 1
    return F.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=groups > 1,
    )


def _dense_prefill(
    context: RaggedContext, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """Prompts of one length: a single causal call on `[requests, heads, tokens, head_dim]`.

    `key`, `value`: those of the batch, `[requests, kv_heads, tokens, head_dim]`.
    """
    out = _attention(
        _by_request(context, query),
        key,
        value,
        is_causal=True,
        scale=scale,
    )
    return out.transpose(1, 2).flatten(0, 1)


def _by_request(context: RaggedContext, x: Tensor) -> Tensor:
    """`[requests, heads, tokens, head_dim]` of `[requests * tokens, heads, head_dim]`."""
    return x.view(len(context.batch.slots), -1, *x.shape[1:]).transpose(1, 2)


def _decode(
    context: RaggedContext,
    query: Tensor,
    keys: Stored,
    values: Stored,
    scale: float,
    mask_kind: _MaskKind,
) -> Tensor:
    """One new token a request: a single call over the slots, shorter requests masked."""
    where = context.where
    mask = None
    if not (where.equal_lengths and mask_kind.is_plain):
        mask = mask_kind.mask(where.position_of_token[:, None], where.max_length)
    out = _attention(
        query[:, :, None],
        keys.read(where.gather, query.dtype),
        values.read(where.gather, query.dtype),
        attn_mask=mask,
        scale=scale,
    )
    return out[:, :, 0]


def _each_request(
    context: RaggedContext,
    query: Tensor,
    keys: Stored,
    values: Stored,
    scale: float,
    mask_kind: _MaskKind,
) -> Tensor:
    """Any mix of prefills, chunks and decodes, one call a request."""
    batch, out = context.batch, torch.empty_like(query)
    row = 0
    for slot, start, count in zip(batch.slots, batch.starts, batch.counts, strict=True):
        end = int(start + count)
        causal = bool(start == 0) and mask_kind.is_plain
        mask = None
        if not causal:
            positions = torch.arange(int(start), end, device=query.device)
            mask = mask_kind.mask(positions[None], end)

        def own(stored: Tensor, slot: int = slot, end: int = end) -> Tensor:
            return stored[slot : slot + 1, :, :end]

        attended = _attention(
            query[row : row + count].transpose(0, 1)[None],
            keys.read(own, query.dtype),
            values.read(own, query.dtype),
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
        )
        out[row : row + count] = attended[0].transpose(0, 1)
        row += int(count)
    return out


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    ragged: RaggedContext | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface on the flattened batch, `query`: `[1, heads, tokens,
    head_dim]`.
    """
    if ragged is None:
        raise ValueError("ragged attention was called without its context")
    out = attend(
        ragged,
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
    )
    return out[None], None


def register() -> None:
    """Make transformers know the attention; safe to call again."""
    AttentionInterface.register(RAGGED_ATTENTION, ragged_attention)
