"""Attention of a flattened micro-batch over per-request KV slots (ORCA's selective batching,
section 4.2).

Every operation but attention treats the new tokens of all requests as one long row. Attention takes
them apart again: equal-length prefills and pure decodes run as one dense call, anything else
request by request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from actors.attention.cpu_decode import DecodeQuery, attend_in_place, can_attend
from actors.attention.cpu_prefill import attend_fresh, prefers_blocks
from actors.attention.kv_cache import KVCache, SlotRows, Stored
from actors.attention.masks import Scoring
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


@dataclass(frozen=True)
class NewTokens:
    """A layer's projections of the micro-batch's new tokens.

    `query`: `[tokens, heads, head_dim]`; `key`, `value`: `[tokens, kv_heads, head_dim]`.
    """

    query: Tensor
    key: Tensor
    value: Tensor


def attend(context: RaggedContext, layer: int, new: NewTokens, scoring: Scoring) -> Tensor:
    """Store the new keys and values, then attend causally within each request.

    Returns `[tokens, heads, head_dim]`.
    """
    query = new.query
    keys, values = context.cache.append(layer, context.where, new.key, new.value)
    scoring = scoring.within(context.where.max_length)
    if context.batch.is_decode:
        if can_attend(keys.numbers):
            return attend_in_place(DecodeQuery(query, context.where, scoring), keys, values)
        return _decode(context, query, keys, values, scoring)
    if context.fresh_equal_prefill and scoring.is_plain:
        gather = context.where.gather
        if keys.scales is None:  # as they come: slots that lie apart would have to be copied
            key, value = _by_request(context, new.key), _by_request(context, new.value)
        else:
            key, value = keys.read(gather, query.dtype), values.read(gather, query.dtype)
        return _dense_prefill(context, query, key, value, scoring.scale)
    return _each_request(context, query, keys, values, scoring)


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
    """Attend within prompts of one length by a single causal call.

    `key`, `value`: those of the batch, `[requests, kv_heads, tokens, head_dim]`.
    """
    out = _attention(_by_request(context, query), key, value, is_causal=True, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)


def _by_request(context: RaggedContext, x: Tensor) -> Tensor:
    """`[requests * tokens, heads, head_dim]` as `[requests, heads, tokens, head_dim]`."""
    return x.view(len(context.batch.slots), -1, *x.shape[1:]).transpose(1, 2)


def _decode(
    context: RaggedContext, query: Tensor, keys: Stored, values: Stored, scoring: Scoring
) -> Tensor:
    """Attend from one new token a request by a single call over the slots, shorter ones masked."""
    where = context.where
    mask = None
    if not (where.equal_lengths and scoring.is_plain):
        mask = scoring.mask(where.position_of_token[:, None], where.max_length, query.dtype)
    out = _attention(
        query[:, :, None],
        keys.read(where.gather, query.dtype),
        values.read(where.gather, query.dtype),
        attn_mask=mask,
        scale=scoring.scale,
    )
    return out[:, :, 0]


def _each_request(
    context: RaggedContext, query: Tensor, keys: Stored, values: Stored, scoring: Scoring
) -> Tensor:
    """Attend in any mix of prefills, chunks and decodes, by one call a request."""
    batch, out = context.batch, torch.empty_like(query)
    row = 0
    for slot, start, count in zip(batch.slots, batch.starts, batch.counts, strict=True):
        end = int(start + count)
        causal = bool(start == 0) and scoring.is_plain
        mask = None
        if not causal:
            positions = torch.arange(int(start), end, device=query.device)
            mask = scoring.mask(positions[None], end, query.dtype)

        def own(stored: Tensor, slot: int = slot, end: int = end) -> Tensor:
            return stored[slot : slot + 1, :, :end]

        attended = _attention(
            query[row : row + count].transpose(0, 1)[None],
            keys.read(own, query.dtype),
            values.read(own, query.dtype),
            attn_mask=mask,
            is_causal=causal,
            scale=scoring.scale,
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
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface on the flattened batch.

    `query`: `[1, heads, tokens, head_dim]`. Of the `options` that models hand on, `ragged` (the
    `RaggedContext`), `scaling` and `sliding_window` count.
    """
    ragged: RaggedContext | None = options.get("ragged")
    if ragged is None:
        raise ValueError("ragged attention was called without its context")
    scaling: float | None = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(
        ragged,
        int(module.layer_idx),  # type: ignore[arg-type]
        NewTokens(*(x[0].transpose(0, 1) for x in (query, key, value))),
        Scoring(scale, options.get("sliding_window")),
    )
    return out[None], None


def register() -> None:
    """Make the attention known to transformers; safe to call again."""
    AttentionInterface.register(RAGGED_ATTENTION, ragged_attention)
