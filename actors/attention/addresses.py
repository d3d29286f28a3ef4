"""Where the tokens of a micro-batch lie in the token slots of the KV cache, and how a token scores
the keys before it: by scale, sliding window and ALiBi.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.messages import MicroBatch, TokenIds
from quant.devices import on_device
from quant.numba_loops import as_array

TokenNumbers = npt.NDArray[np.int32]

MOST_ROWS = 8
"""Rows of a block of a GPU's attention, which share what it reads."""


@dataclass(frozen=True)
class Scoring:
    """Scores are `scale` times the product of query and key.

    `window` limits how many latest positions a token sees, itself included; `alibi_slopes`
    `[heads]` add a bias that grows with the key's position. `sinks` `[heads]` take part in each
    softmax as scores without values (gpt-oss). Products are drawn together to `cap` times the
    hyperbolic tangent of their share of it (Gemma 2).
    """

    scale: float
    window: int | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    cap: float | None = None

    def within(self, length: int) -> Scoring:
        """Equal scores for requests of at most `length` tokens, without a window they fit in."""
        if self.window is None or self.window < length:
            return self
        return replace(self, window=None)

    @property
    def is_plain(self) -> bool:
        """Whether scores are those of products, and a mask expresses nothing beyond causality."""
        return self.window is None and self.alibi_slopes is None and self.cap is None

    def mask(self, query_positions: Tensor, key_count: int, dtype: torch.dtype) -> Tensor:
        """What is added to scores, in `dtype`: the ALiBi bias or 0, minus infinity where a key is
        hidden.

        `query_positions`: `[requests, queries]`; returns `[requests, 1 or heads, queries,
        key_count]`.
        """
        keys = torch.arange(key_count, device=query_positions.device)
        positions = query_positions[:, None, :, None]
        hidden = keys > positions
        if self.window is not None:
            hidden |= keys <= positions - self.window
        bias = torch.zeros(1, 1, 1, 1, dtype=dtype, device=keys.device)
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes.to(keys.device)
            bias = (slopes[:, None] * keys).to(dtype)[None, :, None, :]
        masked: Tensor = bias.masked_fill(hidden, -math.inf)
        return masked


@dataclass(frozen=True)
class EvenRanges:
    """`count` ranges of `length` token slots, which begin at `first` and then every `step`."""

    first: int
    step: int
    count: int
    length: int

    @classmethod
    def of(cls, begins: TokenIds, length: int) -> EvenRanges | None:
        """Ranges of `length` from `begins` `[requests]` on; None where they are not equally far
        apart, or overlap.
        """
        first, count = int(begins[0]), len(begins)
        step = int(begins[1]) - first if count > 1 else length
        if step < length or (count > 2 and (np.diff(begins) != step).any()):
            return None
        return cls(first, step, count, length)

    def view(self, stored: Tensor) -> Tensor:
        """These ranges of `stored` `[kv_heads, tokens, ...]` in place: `[count, kv_heads, length,
        ...]`.
        """
        heads, token, *others = stored.stride()
        return stored.as_strided(
            (self.count, stored.shape[0], self.length, *stored.shape[2:]),
            (self.step * token, heads, token, *others),
            stored.storage_offset() + self.first * token,
        )


class Block(NamedTuple):
    """New tokens, rows `tokens` of the flattened batch, which belong in these `ranges`."""

    tokens: slice
    ranges: EvenRanges


@dataclass(frozen=True)
class Addresses:
    """The addresses of `batch`, with tensors on the stage's `device`, made once per pass.

    `blocks` are written as such: a fifth of the time of single addresses on a CPU. `in_place`: the
    whole requests where they are read without a copy. One copy has at most `most_copied` tokens:
    those of the cache, or where plans count on attention without copies, which a failed self-test
    took away, those of the longest request.
    """

    batch: MicroBatch
    device: torch.device
    blocks: tuple[Block, ...]
    in_place: EvenRanges | None
    most_copied: int
    _masks: dict[int | None, Tensor] = field(default_factory=dict)  # by window
    _tiles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by group

    @classmethod
    def of(
        cls,
        batch: MicroBatch,
        device: torch.device,
        own_ends: TokenIds | None = None,
        reads_ranges: bool = False,
    ) -> Addresses:
        """Addresses of `batch` on `device`.

        `own_ends` `[tokens]`: for each token slot at which a request begins, the end of those which
        are its own and hold finite numbers or its own (0: not known). Shorter requests are read in
        place with longer ones only where these show that nothing of others is read.
        """
        lengths, longest = batch.lengths, int(batch.lengths.max())
        in_place = EvenRanges.of(batch.begins, longest)
        if in_place is not None and (lengths != longest).any():
            ends = None if own_ends is None else own_ends[batch.begins]
            if ends is None or (ends < batch.begins + longest).any():
                in_place = None
        most_copied = len(lengths) * longest if own_ends is None else len(own_ends)
        if reads_ranges:
            most_copied = longest
        return cls(batch, device, _blocks(batch, device), in_place, most_copied)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request, with its new ones."""
        return int(self.batch.lengths.max())

    @cached_property
    def equal_lengths(self) -> bool:
        return bool((self.batch.lengths == self.longest).all())

    @cached_property
    def read_together(self) -> tuple[tuple[Tensor | slice, Addresses], ...]:
        """Rows of requests that are read by one copy, and their addresses: all of them, or where
        that copy would be larger than the cache, those of like lengths.
        """
        batch = self.batch
        if self.in_place is not None or len(batch.slots) * self.longest <= self.most_copied:
            return ((slice(None), self),)
        order = np.argsort(-batch.lengths, kind="stable")
        groups: list[tuple[Tensor | slice, Addresses]] = []
        while len(order):
            count = max(1, self.most_copied // int(batch.lengths[order[0]]))
            rows, order = order[:count], order[count:]
            own = Addresses(batch.of_rows(rows), self.device, (), None, self.most_copied)
            groups.append((on_device(self.device, rows)[0], own))
        return tuple(groups)

    def decode_mask(self, scoring: Scoring, dtype: torch.dtype) -> Tensor | None:
        """`Scoring.mask` of one new token a request; None where every token sees all.

        It is made once a pass, of whose layers the scoring differs in the window alone.
        """
        scoring = scoring.within(self.longest)
        if self.equal_lengths and scoring.is_plain:
            return None
        if scoring.window not in self._masks:
            mask = scoring.mask(self.positions[:, None], self.longest, dtype)
            self._masks[scoring.window] = mask
        return self._masks[scoring.window]

    def tile_rows(self, group: int) -> int:
        """Rows of a tile of `tiles`: as few as hold a request's rows, at most 8."""
        return min(MOST_ROWS, 1 << (group * int(self.batch.counts.max()) - 1).bit_length())

    def tiles(self, group: int) -> tuple[Tensor, Tensor]:
        """The requests as a GPU's attention is told of them, int32 `[requests, 4]`: where the range
        begins, then position, row in the batch and number of new tokens; and its tiles `[tiles,
        2]`: a request, and the first of `tile_rows` rows out of `group` times its new tokens.
        """
        if group not in self._tiles:
            tell(group, [(self, [self])])
        return self._tiles[group]

    @cached_property
    def positions(self) -> Tensor:
        """Position of every new token within its request, `[sum(counts)]`."""
        return on_device(self.device, self.batch.positions)[0]

    @cached_property
    def token_slots(self) -> Tensor:
        """Token slot of every new token, int32 `[sum(counts)]`."""
        return on_device(self.device, self._slots.astype(np.int32))[0]

    @property
    def _slots(self) -> TokenIds:
        return self.batch.positions + np.repeat(self.batch.begins, self.batch.counts)

    @property
    def _numbers(self) -> tuple[TokenNumbers, TokenNumbers]:
        """Positions and token slots of the new tokens."""
        return self.batch.positions.astype(np.int32), self._slots.astype(np.int32)

    def _tables(self, group: int) -> tuple[TokenNumbers, TokenNumbers]:
        batch, rows = self.batch, self.tile_rows(group)
        counts = -(-batch.counts * group // rows)
        requests = np.repeat(np.arange(len(counts)), counts)
        firsts = np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)
        begun = np.cumsum(batch.counts) - batch.counts
        told = np.stack([batch.begins, batch.starts, begun, batch.counts], axis=1)
        tiles = np.stack([requests, firsts * rows], axis=1)
        return told.astype(np.int32), tiles.astype(np.int32)

    @cached_property
    def _scattered(self) -> tuple[Tensor | slice, Tensor] | None:
        """Rows of the new tokens that are in no block, and their token slots; None: there are
        none.
        """
        slots = self._slots
        if not self.blocks:
            return slice(None), on_device(self.device, slots)[0]
        left = np.ones(len(slots), dtype=np.bool_)
        for block in self.blocks:
            left[block.tokens] = False
        rows = np.flatnonzero(left)
        if not len(rows):
            return None
        own_rows, own_slots = on_device(self.device, rows, slots[rows])
        return own_rows, own_slots

    @cached_property
    def _index(self) -> Tensor:
        """Token slots of every request up to the longest one, `[requests, longest]`.

        Beyond a request's end they repeat its last token: what others hold need not be finite, and
        would spoil the sum although its share is nothing.
        """
        pairs = np.stack([self.batch.begins, self.batch.lengths - 1])
        begins, ends = on_device(self.device, pairs)[0][:, :, None]
        positions = torch.arange(self.longest, device=self.device).minimum(ends)
        index: Tensor = begins + positions
        return index

    def write(self, stored: Tensor, new: Tensor) -> None:
        """Put `new` `[sum(counts), kv_heads, ...]` where the new tokens belong in `stored`
        `[kv_heads, tokens, ...]`.
        """
        for tokens, ranges in self.blocks:
            own = new[tokens].unflatten(0, (ranges.count, ranges.length))
            ranges.view(stored).copy_(own.transpose(1, 2))
        if self._scattered is None:
            return
        rows, slots = self._scattered
        if stored.device.type == "cpu":  # an eighth of the time of torch's assignment
            as_array(stored)[:, slots.numpy()] = as_array(new[rows].transpose(0, 1))
        else:
            stored[:, slots] = new[rows].transpose(0, 1)

    def read(self, stored: Tensor) -> Tensor:
        """The requests' ranges of `stored` `[kv_heads, tokens, ...]`: `[requests, kv_heads,
        longest, ...]`, a view where they are read in place.

        Beyond a shorter request's end there is what it hides by a mask: finite numbers or its own.
        """
        if self.in_place is not None:
            return self.in_place.view(stored)
        picked = stored.index_select(1, self._index.flatten())
        apart: Tensor = picked.unflatten(1, self._index.shape)
        return apart.transpose(0, 1)


def tell(
    group: int,
    layouts: Sequence[tuple[Addresses, Sequence[Addresses]]],
    into: Tensor | None = None,
) -> None:
    """Bring to the device, by one copy, what kernels ask of a pass with `group` queries for each
    head of keys: of each layout positions and token slots of the whole, tables of its parts.

    The copy goes to the beginning of `into`, bytes on the device, where that is given.
    """
    arrays = [
        array
        for whole, parts in layouts
        for array in (*whole._numbers, *(table for part in parts for table in part._tables(group)))
    ]
    there = iter(on_device(layouts[0][0].device, *arrays, into=into))
    for whole, parts in layouts:
        whole.__dict__["positions"], whole.__dict__["token_slots"] = next(there), next(there)
        for part in parts:
            part._tiles[group] = next(there), next(there)


def _blocks(batch: MicroBatch, device: torch.device) -> tuple[Block, ...]:
    """One block of everything, if requests add as many tokens each to ranges that are equally far
    apart; else on a CPU as many blocks as it takes. A GPU writes by an index sooner than it is told
    of many blocks.
    """
    alike = bool((batch.counts == batch.counts[0]).all())
    whole = _block(batch, 0, slice(0, len(batch.slots))) if alike else None
    if whole is not None:
        return (whole,)
    return tuple(_runs(batch)) if device.type == "cpu" else ()


def _runs(batch: MicroBatch) -> Iterator[Block]:
    """Blocks of neighbours with equal counts where they are even, else of one prompt each; single
    tokens that lie apart are in none.
    """
    counts = batch.counts
    firsts = np.cumsum(counts) - counts
    edges = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(counts)]
    for rows in (slice(*pair) for pair in pairwise(edges)):
        one_token = counts[rows.start] == 1
        together = None
        if not one_token or rows.stop - rows.start > 1:
            together = _block(batch, int(firsts[rows.start]), rows)
        if together is not None:
            yield together
        elif not one_token:
            each = (slice(row, row + 1) for row in range(rows.start, rows.stop))
            alone = (_block(batch, int(firsts[row.start]), row) for row in each)
            yield from (block for block in alone if block is not None)


def _block(batch: MicroBatch, token: int, rows: slice) -> Block | None:
    """The requests of `rows`, whose new tokens begin at `token`, if their ranges are even."""
    count = int(batch.counts[rows.start])
    ranges = EvenRanges.of((batch.begins + batch.starts)[rows], count)
    tokens = slice(token, token + (rows.stop - rows.start) * count)
    return None if ranges is None else Block(tokens, ranges)
