"""Where the tokens of a pass lie, by kinds of layers, and in which parts attention takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from actors.attention.addresses import Addresses, tell
from actors.attention.delta.states import TokenRuns
from actors.attention.kv_cache import KVCache
from actors.attention.stored import Stored
from actors.attention.timer import AttentionTimer
from actors.attention.windows import WindowPass
from actors.messages import MicroBatch, TokenIds
from quant.devices import on_device


@dataclass(frozen=True)
class Part:
    """Requests of one kind of a micro-batch, with the rows of their `tokens` in it.

    `decode`: one new token each; `prompts`: equal numbers of tokens without earlier ones;
    `chunks`: anything else. `in_scratch`: see `actors.attention.windows`.
    """

    kind: Literal["decode", "prompts", "chunks"]
    tokens: slice | Tensor
    where: Addresses
    in_scratch: bool = False

    def by_request(self, new: Tensor) -> Tensor:
        """Rows of prompts out of `new` `[sum(counts), heads, head_dim]` as `[requests, heads,
        tokens, head_dim]`.
        """
        requests: Tensor = new[self.tokens].unflatten(0, (len(self.where.batch.slots), -1))
        return requests.transpose(1, 2)


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a pass lie in layers of one kind: new ones are written to `where`, and
    read by `parts`. `window`: of layers whose windows have rooms.
    """

    where: Addresses
    parts: tuple[Part, ...]
    window: WindowPass | None = None


@dataclass(frozen=True)
class RaggedContext:
    """The cache, and the layout of a micro-batch in layers that keep all tokens, and by window in
    those that have rooms, that a pass through the stage's layers needs. A `timer` times each
    layer's attention. `store` writes new tokens' keys and values (`actors.attention.ragged`) to
    token slots of a layer's own, to none for -1, and makes queries what `Stored.asked` does; None:
    operations of PyTorch do, which know no rows that are nobody's.
    """

    cache: KVCache
    whole: Layout
    windows: Mapping[int, Layout] = field(default_factory=dict)
    timer: AttentionTimer | None = None
    store: Callable[[Any, Tensor, tuple[Stored, Stored]], None] | None = None

    @classmethod
    def of(cls, cache: KVCache, batch: MicroBatch, own_kernels: bool = False) -> RaggedContext:
        """The context of `batch`; with `own_kernels` all but prompts are one part of it."""
        parts = partial(_parts, own_kernels=own_kernels)
        return cls._of_parts(cache, batch, parts)

    @classmethod
    def of_tokens(cls, cache: KVCache, batch: MicroBatch) -> RaggedContext:
        """As `of`, where `batch` has one token a request, each of them a decode step, also those of
        prompts.
        """
        return cls._of_parts(cache, batch, _decode_part)

    @classmethod
    def _of_parts(cls, cache: KVCache, batch: MicroBatch, parts: PartsOf) -> RaggedContext:
        where = cache.addresses(batch)
        windows = {
            window: _window_layout(own, cache, parts) for window, own in cache.enter(batch).items()
        }
        return cls(cache, Layout(where, parts(where, cache.addresses)), windows)

    @property
    def where(self) -> Addresses:
        return self.whole.where

    @cached_property
    def runs(self) -> TokenRuns:
        """The new tokens by requests, made once a pass."""
        return TokenRuns.of(self.where.batch, self.where.device)

    def layout(self, layer: int) -> Layout:
        window = self.cache.window_of(layer)
        return self.whole if window is None else self.windows[window]

    def held(self, layer: int) -> tuple[Stored, Stored]:
        """The keys and values that the layer's new tokens are written to: those of the cache, or of
        a scratch.
        """
        window, held = self.layout(layer).window, self.cache.of_layer(layer)
        if window is None or window.scratch is None:
            return held
        owner = self.cache.owner(layer)
        return window.scratch.of_layer(owner, held, self.cache.is_shared(owner))

    def tell(self, group: int, into: Tensor | None = None) -> None:
        """As `addresses.tell`, of all parts of all layouts."""
        layouts = (self.whole, *self.windows.values())
        tell(group, [(each.where, [p.where for p in each.parts]) for each in layouts], into)


PartsOf = Callable[[Addresses, Callable[[MicroBatch], Addresses]], tuple[Part, ...]]
"""Makes the parts of a batch by its addresses, and by what gives addresses to some of its rows."""


def _decode_part(where: Addresses, _: Callable[[MicroBatch], Addresses]) -> tuple[Part, ...]:
    return (Part("decode", slice(None), where),)


def _window_layout(own: WindowPass, cache: KVCache, parts: PartsOf) -> Layout:
    """The layout in layers of one window; rows in rooms and rows in the scratch are parts of their
    own.
    """
    where = cache.window_addresses(own.written)
    if own.read is own.written or own.in_scratch.all():
        found = parts(where, cache.window_addresses)
        return Layout(where, _in_scratch(found, own.scratch is not None), own)
    both = list[Part]()
    for in_scratch in (False, True):
        rows = np.flatnonzero(own.in_scratch == in_scratch)
        each = parts(cache.window_addresses(own.read.of_rows(rows)), cache.window_addresses)
        both += _in_scratch(_placed(each, own.read, rows), in_scratch)
    return Layout(where, tuple(both), own)


def _in_scratch(parts: tuple[Part, ...], in_scratch: bool) -> tuple[Part, ...]:
    return tuple(replace(part, in_scratch=in_scratch) for part in parts)


def _placed(parts: tuple[Part, ...], batch: MicroBatch, rows: TokenIds) -> tuple[Part, ...]:
    """The `parts` of these `rows` of `batch`, with places of their tokens in all of it."""
    counts = batch.counts[rows]
    firsts = (np.cumsum(batch.counts) - batch.counts)[rows]
    tokens = np.concatenate([np.arange(f, f + n) for f, n in zip(firsts, counts, strict=True)])
    there = on_device(parts[0].where.device, tokens)[0]
    return tuple(replace(part, tokens=there[part.tokens]) for part in parts)


def _parts(
    where: Addresses, addresses: Callable[[MicroBatch], Addresses], own_kernels: bool
) -> tuple[Part, ...]:
    """Decode steps, the prompts of each length, and parts of prompts, as far as there are some."""
    batch = where.batch
    if batch.is_decode:
        return _decode_part(where, addresses)
    if (batch.counts == batch.counts[0]).all() and not batch.starts.any():
        return (Part("prompts", slice(None), where),)
    is_prompt = batch.starts == 0
    decode_rows = batch.decode_rows & (not own_kernels)
    groups: list[tuple[Literal["decode", "prompts", "chunks"], TokenIds]] = [
        ("decode", np.flatnonzero(decode_rows)),
        *(
            ("prompts", np.flatnonzero(is_prompt & (batch.counts == length)))
            for length in np.unique(batch.counts[is_prompt])
        ),
        ("chunks", np.flatnonzero(~is_prompt & ~decode_rows)),
    ]
    firsts = np.cumsum(batch.counts) - batch.counts
    parts = []
    for kind, rows in groups:
        if len(rows):
            part = batch.of_rows(rows)
            own = addresses(part)
            parts.append(Part(kind, _token_rows(firsts[rows], part.counts, own.device), own))
    return tuple(parts)


def _token_rows(firsts: TokenIds, counts: TokenIds, device: torch.device) -> slice | Tensor:
    """Rows of requests of which each has `counts` tokens from `firsts` on: a slice where these
    follow each other.
    """
    ends = firsts + counts
    if (firsts[1:] == ends[:-1]).all():
        return slice(int(firsts[0]), int(ends[-1]))
    each = [np.arange(first, end) for first, end in zip(firsts, ends, strict=True)]
    return on_device(device, np.concatenate(each))[0]
