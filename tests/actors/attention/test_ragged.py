"""Ragged attention against a per-request softmax written out in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from actors.attention.kv_cache import (
    CacheForm,
    CacheShape,
    KVCache,
    Stored,
    quantized,
)
from actors.attention.masks import Scoring
from actors.attention.ragged import NewTokens, RaggedContext, attend
from tests.actors.batches import batch_in_ranges

HEADS, KV_HEADS, DIM, SLOTS, LENGTH = 6, 2, 8, 5, 24
SHAPE = CacheShape(SLOTS * LENGTH, KV_HEADS, DIM)
CPU = torch.device("cpu")


def context(
    cache: KVCache, slots: list[int], starts: list[int], counts: list[int]
) -> RaggedContext:
    return RaggedContext.of(cache, batch_in_ranges(slots, starts, counts, slot_tokens=LENGTH))


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    slopes: Tensor | None,
) -> Tensor:
    """Attention of a whole request `[tokens, heads, dim]` on itself, one position at a time."""
    out = torch.empty_like(query, dtype=torch.float64)
    for i in range(len(query)):
        first = 0 if window is None else max(0, i + 1 - window)
        for head in range(HEADS):
            keys = key[first : i + 1, head * KV_HEADS // HEADS].double()
            scores = keys @ query[i, head].double() * scale
            if slopes is not None:
                scores = scores + slopes[head].double() * torch.arange(first, i + 1)
            weights = scores.softmax(0)
            out[i, head] = weights @ value[first : i + 1, head * KV_HEADS // HEADS].double()
    return out


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize(("kv_bits", "compiled"), [(16, True), (8, True), (8, False)])
def test_chunks_decodes_and_joins_equal_whole_requests(
    window: int | None,
    alibi: bool,
    kv_bits: int,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests come in as prefill, chunks and single tokens, in slots out of order. At 8 bits every
    token sees what the codes stand for, also of its own keys, whatever it came in with.
    """
    if not compiled:
        monkeypatch.setattr("actors.attention.ragged.can_attend", lambda stored: False)
    torch.manual_seed(0)
    slopes = torch.rand(HEADS) if alibi else None
    lengths = {3: 13, 0: 9, 4: 11}
    whole = {
        slot: (
            torch.randn(n, HEADS, DIM),
            torch.randn(n, KV_HEADS, DIM),
            torch.randn(n, KV_HEADS, DIM),
        )
        for slot, n in lengths.items()
    }
    cache = KVCache(range(2, 3), SHAPE, CacheForm(torch.float32, CPU, kv_bits))
    done = dict.fromkeys(lengths, 0)
    got: dict[int, list[Tensor]] = {slot: [] for slot in lengths}
    steps = [
        {3: 5},
        {0: 4, 4: 4},
        {3: 3, 0: 1},
        {3: 1, 0: 1, 4: 1},
        {0: 1, 4: 1},
        {4: 5, 3: 4, 0: 2},
    ]
    for step in steps:
        slots = list(step)
        parts = [tuple(t[done[s] : done[s] + step[s]] for t in whole[s]) for s in slots]
        query, key, value = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        made = context(cache, slots, [done[s] for s in slots], [step[s] for s in slots])
        out = attend(made, 2, NewTokens(query, key, value), Scoring(0.3, window, slopes))
        for slot, piece in zip(slots, out.split([step[s] for s in slots]), strict=True):
            got[slot].append(piece)
            done[slot] += step[slot]
    assert done == lengths
    for slot, (query, *stored) in whole.items():
        if kv_bits == 8:
            codes = [Stored(*quantized(numbers)) for numbers in stored]
            stored = [each.read(lambda t: t, torch.float32) for each in codes]
        expected = written_out(query, *stored, 0.3, window, slopes)
        torch.testing.assert_close(torch.cat(got[slot]).double(), expected, atol=1e-5, rtol=1e-4)


def test_nothing_of_an_earlier_request_in_the_slot_is_seen() -> None:
    torch.manual_seed(1)
    cache = KVCache(range(1), replace(SHAPE, tokens=LENGTH), CacheForm(torch.float32, CPU))
    for length in (20, 6):
        query = torch.randn(length, HEADS, DIM)
        key, value = torch.randn(2, length, KV_HEADS, DIM)
        new = NewTokens(query, key, value)
        out = attend(context(cache, [0], [0], [length]), 0, new, Scoring(0.3))
        expected = written_out(query, key, value, 0.3, None, None)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
