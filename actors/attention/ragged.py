"""Attention of a flattened micro-batch over per-request ranges of the KV cache (ORCA's selective
batching, section 4.2).

Every operation but attention treats the new tokens of all requests as one long row. Attention takes
them apart again: decode steps run as one dense call, prompts as one for each length, and parts of
prompts request by request.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from actors.attention.addresses import Addresses, Scoring
from actors.attention.cpu import (
    attend_fresh,
    attend_in_place,
    can_attend,
    prefers_blocks,
)
from actors.attention.cuda import RangeAttention, range_attention
from actors.attention.head_products import HeadProducts
from actors.attention.layouts import Part
from actors.attention.layouts import RaggedContext as RaggedContext
from actors.attention.stored import Stored
from actors.messages import MicroBatch

RAGGED_ATTENTION = "llmpq_ragged"


@dataclass(frozen=True)
class NewTokens:
    """A layer's projections of the micro-batch's new tokens.

    `query`: `[tokens, heads, head_dim]`; `key`, `value`: `[tokens, kv_heads, head_dim]`, of latents
    these and the `products` that make keys and values of them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    products: HeadProducts | None = field(default=None, kw_only=True)


def attend(context: RaggedContext, layer: int, new: NewTokens, scoring: Scoring) -> Tensor:
    """Store the new keys and values, then attend causally within each request.

    Returns `[tokens, heads, head_dim]`, of latents the width of values; rows of `new` beyond the
    tokens of the context are nobody's and get zeros.
    """
    own, where = int(context.where.batch.counts.sum()), context.layout(layer).where
    with context.timer or nullcontext():
        held = context.held(layer)
        if context.store is not None and context.cache.owner(layer) == layer:
            context.store(new, where.token_slots, held)
            return attend_stored(context, layer, new, scoring)
        keys, _ = context.cache.append(layer, where, new.key[:own], new.value[:own], held)
        asked = replace(new, query=keys.asked(new.query[:own]))
        out = attend_stored(context, layer, asked, scoring)
    return with_rows(out, len(new.query))


def with_rows(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` with zeros behind it, of so many rows in all."""
    if len(tensor) == rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


def attend_stored(context: RaggedContext, layer: int, new: NewTokens, scoring: Scoring) -> Tensor:
    """Attend causally within each request, whose new keys and values are written to where the
    context has them `held`; queries are as `Stored.asked` makes them. Returns what `attend` does.
    """
    layout, held, written = context.layout(layer), context.cache.of_layer(layer), None
    if layout.window is not None:
        if scoring.window != layout.window.window:
            raise RuntimeError(
                f"layer {layer} attends to a window of {scoring.window} tokens, and rooms were "
                f"made for {layout.window.window}"
            )
        if layout.window.scratch is not None:
            written = context.held(layer)
            if context.cache.owner(layer) == layer:
                layout.window.scratch.settle(written, held)

    def attended(part: Part) -> Tensor:
        keys, values = written if part.in_scratch and written is not None else held
        return _attend(part, new, keys, values, scoring)

    if len(layout.parts) == 1:
        return attended(layout.parts[0])
    width = new.query.shape[-1] if new.products is None else new.products.widths[1]
    out = new.query.new_empty(*new.query.shape[:2], width)
    for part in layout.parts:
        out[part.tokens] = attended(part)
    return out


def _attend(part: Part, new: NewTokens, keys: Stored, values: Stored, scoring: Scoring) -> Tensor:
    """Attention of `part`, `[tokens of the part, heads, head_dim]`; all keys are stored."""
    scoring = scoring.within(part.where.longest)
    is_left = scoring.sinks is None or _own_kernels(new.query, keys) is None
    if part.kind == "prompts" and scoring.is_plain and is_left:
        return _attend_prompts(part, new, keys, values, scoring)
    query = new.query[part.tokens]
    if new.products is not None:
        query = new.products.of_queries(query)
    found = _attend_ranges(part, query, keys, values, scoring)
    return found if new.products is None else new.products.of_results(found)


def _attend_prompts(
    part: Part, new: NewTokens, keys: Stored, values: Stored, scoring: Scoring
) -> Tensor:
    """Attention of whole prompts whose scores are those of products."""
    query = part.by_request(new.query)
    if keys.scales is None and part.where.in_place is None:  # as they come, rather than by a copy
        key = part.by_request(new.key)
        value = key if new.value is new.key else part.by_request(new.value)
    else:
        key, value = _read(keys, values, part.where.read, query.dtype)
    if new.products is not None:
        key, value = new.products.expanded(key)
    out = _attention(query, key, value, scoring, is_causal=True)
    return out.transpose(1, 2).flatten(0, 1)


def _attend_ranges(
    part: Part, query: Tensor, keys: Stored, values: Stored, scoring: Scoring
) -> Tensor:
    where, own_kernels = part.where, _own_kernels(query, keys)
    if own_kernels is not None:
        return own_kernels.attend(query, where, scoring, (keys, values))
    if part.kind != "decode":
        return _each_request(where.batch, query, keys, values, scoring)
    if can_attend(keys.numbers):
        return attend_in_place(query, where.batch, scoring, keys, values)
    return _decode(where, query, keys, values, scoring)


def _own_kernels(query: Tensor, keys: Stored) -> RangeAttention | None:
    width = query.shape[-1]
    if width != keys.numbers.shape[-1]:  # codes of latents, which are more
        return None
    return range_attention(width, query.dtype, keys.scales is not None, query.device)


def _attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scoring: Scoring,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Scaled dot product of `[requests, heads, tokens, head_dim]` with grouped keys and values, of
    whose `scoring` `attn_mask` says what a mask can.

    On CPUs the flash kernel takes values as wide as keys alone. On CUDA only that kernel knows
    grouped heads, and it takes neither masks nor GPUs below 8.0; the fallback would write out all
    scores in float32, so the heads are repeated for it instead.
    """
    if scoring.sinks is not None:
        sinks = scoring.sinks.unsqueeze(-1)
        return _with_sinks(query, (keys, values), sinks, scoring, attn_mask, is_causal)
    if scoring.cap is not None:  # as no kernel of torch does
        return _plainly(query, (keys, values), scoring, attn_mask, is_causal)[0]
    if is_causal and prefers_blocks(query):
        prompts = zip(query, keys, values, strict=True)
        return torch.stack([attend_fresh(q, k, v, scoring.scale) for q, k, v in prompts])
    groups = query.shape[1] // keys.shape[1]
    if groups > 1 and query.is_cuda:
        flash = attn_mask is None and torch.cuda.get_device_capability(query.device) >= (8, 0)
        if not flash or query.dtype == torch.float32:
            repeated = keys.repeat_interleave(groups, dim=1)
            values = repeated if values is keys else values.repeat_interleave(groups, dim=1)
            keys, groups = repeated, 1
    width = values.shape[-1]
    is_narrow = width < query.shape[-1] and not query.is_cuda
    if is_narrow:
        values = F.pad(values, (0, query.shape[-1] - width))
    out = F.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scoring.scale,
        enable_gqa=groups > 1,
    )
    return out[..., :width] if is_narrow else out


def _with_sinks(
    query: Tensor,
    held: tuple[Tensor, Tensor],
    sinks: Tensor,
    scoring: Scoring,
    mask: Tensor | None,
    is_causal: bool = False,
) -> Tensor:
    """As `_attention` with the keys and values `held`, where `sinks` `[heads, 1 or tokens]` take
    part in the softmax: the other shares are their part of it smaller.
    """
    if query.device.type == "cpu":
        out, logarithms = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, *held, 0.0, is_causal, attn_mask=mask, scale=scoring.scale
        )
    else:
        out, logarithms = _plainly(query, held, scoring, mask, is_causal)
    rest = torch.sigmoid(logarithms - sinks.float())
    shrunk: Tensor = out * rest.unsqueeze(-1).to(out.dtype)
    return shrunk


def _plainly(
    query: Tensor,
    held: tuple[Tensor, Tensor],
    scoring: Scoring,
    mask: Tensor | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attention written out, and the logarithms of the sums that its shares are divided by, float32
    `[requests, heads, tokens]`.
    """
    groups = query.shape[1] // held[0].shape[1]
    keys, values = (each.repeat_interleave(groups, dim=1) for each in held)
    scores = (query @ keys.transpose(-1, -2)).float() * scoring.scale
    if scoring.cap is not None:
        scores = (scores / scoring.cap).tanh() * scoring.cap
    if mask is not None:
        scores = scores + mask
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu_(1)
        scores = scores.masked_fill_(later, -torch.inf)
    logarithms = scores.logsumexp(-1)
    shares = (scores - logarithms.unsqueeze(-1)).exp().to(values.dtype)
    return shares @ values, logarithms


def _decode(
    where: Addresses, query: Tensor, keys: Stored, values: Stored, scoring: Scoring
) -> Tensor:
    """Attend from one new token a request, by one call where one copy of the ranges will do."""
    groups = where.read_together
    if len(groups) == 1:
        return _decode_together(where, query, keys, values, scoring)
    out = torch.empty_like(query)
    for rows, own in groups:
        out[rows] = _decode_together(own, query[rows], keys, values, scoring)
    return out


def _decode_together(
    where: Addresses, query: Tensor, keys: Stored, values: Stored, scoring: Scoring
) -> Tensor:
    """Attend from one new token a request by a single call over the ranges, shorter ones masked.

    The queries that share keys and values stand as rows of one head, as if they were tokens: no
    kernel needs to know grouped heads, nor keys to be repeated.
    """
    kv_heads = keys.numbers.shape[0]
    mask = where.decode_mask(scoring, query.dtype)
    if mask is not None and mask.shape[1] > 1:  # ALiBi
        mask = mask.view(len(mask), kv_heads, -1, where.longest)
    held = _read(keys, values, where.read, query.dtype)
    grouped = query.unflatten(1, (kv_heads, -1))
    if scoring.sinks is not None:
        sinks = scoring.sinks.view(kv_heads, -1)
        return _with_sinks(grouped, held, sinks, scoring, mask).flatten(1, 2)
    out = _attention(grouped, *held, scoring, mask)
    return out.flatten(1, 2)


def _read(
    keys: Stored, values: Stored, pick: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What `pick` takes of both, by one copy where keys are values."""
    read = keys.read(pick, dtype)
    return read, read if values is keys else values.read(pick, dtype)


def _each_request(
    batch: MicroBatch, query: Tensor, keys: Stored, values: Stored, scoring: Scoring
) -> Tensor:
    """Attend in prompts and parts of prompts of any lengths, by one call a request."""
    out = torch.empty_like(query)
    row = 0
    for begin, start, count in zip(
        *(each.tolist() for each in (batch.begins, batch.starts, batch.counts)), strict=True
    ):
        end = start + count
        causal = start == 0 and scoring.is_plain
        mask = None
        if not causal:
            positions = torch.arange(start, end, device=query.device)
            mask = scoring.mask(positions[None], end, query.dtype)

        def own(stored: Tensor, begin: int = begin, end: int = end) -> Tensor:
            return stored[None, :, begin : begin + end]

        attended = _attention(
            query[row : row + count].transpose(0, 1)[None],
            *_read(keys, values, own, query.dtype),
            scoring,
            attn_mask=mask,
            is_causal=causal,
        )
        out[row : row + count] = attended[0].transpose(0, 1)
        row += count
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
    `RaggedContext`), `scaling`, `sliding_window`, `s_aux` (sinks) and `softcap` count.
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
        Scoring(
            scale,
            options.get("sliding_window"),
            sinks=options.get("s_aux"),
            cap=options.get("softcap"),
        ),
    )
    return out[None], None


def register() -> None:
    """Make the attention known to transformers; safe to call again."""
    AttentionInterface.register(RAGGED_ATTENTION, ragged_attention)
