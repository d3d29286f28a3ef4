"""Ragged attention against a per-request softmax written out in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.attention import ragged
from actors.attention.addresses import Addresses, Scoring
from actors.attention.kv_cache import CacheForm, CacheShape, KVCache
from actors.attention.ragged import NewTokens, RaggedContext, attend
from actors.attention.stored import Stored, quantized
from actors.messages import MicroBatch, TokenRange
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
    sinks: Tensor | None = None,
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
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            weights = scores.softmax(0)[: len(keys)]
            out[i, head] = weights @ value[first : i + 1, head * KV_HEADS // HEADS].double()
    return out


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("heads", ["plain", "alibi", "sinks"])
@pytest.mark.parametrize(("kv_bits", "compiled"), [(16, True), (16, False), (8, True), (8, False)])
def test_chunks_decodes_and_joins_equal_whole_requests(
    window: int | None,
    heads: str,
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
    slopes = torch.rand(HEADS) if heads == "alibi" else None
    sinks = 2 * torch.randn(HEADS) if heads == "sinks" else None
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
        out = attend(made, 2, NewTokens(query, key, value), Scoring(0.3, window, slopes, sinks))
        for slot, piece in zip(slots, out.split([step[s] for s in slots]), strict=True):
            got[slot].append(piece)
            done[slot] += step[slot]
    assert done == lengths
    for slot, (query, *stored) in whole.items():
        if kv_bits == 8:
            codes = [Stored(*quantized(numbers)) for numbers in stored]
            stored = [each.read(lambda t: t, torch.float32) for each in codes]
        expected = written_out(query, *stored, 0.3, window, slopes, sinks)
        torch.testing.assert_close(torch.cat(got[slot]).double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_sinks_by_written_out_products_are_those_of_the_kernel(masked: bool) -> None:
    """Where a GPU has none of our kernels."""
    query, sinks = torch.randn(2, HEADS, 5, DIM), torch.randn(HEADS, 1)
    held = torch.randn(2, KV_HEADS, 5, DIM), torch.randn(2, KV_HEADS, 5, DIM)
    mask = torch.zeros(1, 1, 5, 5).masked_fill_(torch.ones(5, 5).tril() == 0, -torch.inf)
    how = (mask, False) if masked else (None, True)
    out, logarithms = ragged._plainly(query, held, Scoring(0.3), *how)
    found = out * torch.sigmoid(logarithms - sinks).unsqueeze(-1)
    torch.testing.assert_close(found, ragged._with_sinks(query, held, sinks, Scoring(0.3), *how))


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize(
    ("begins", "lengths", "calls"),
    [
        ([0, 24, 48], [9, 9, 9], [(3, 9, False)]),  # in place, all of them seen
        ([0, 50, 24], [9, 24, 3], [(3, 24, True)]),
        (
            [0, 85, 4, 8],
            [4, 30, 4, 3],
            [(3, 30, True), (1, 3, False)],
        ),  # 120 would be copied of 115
    ],
)
def test_decode_on_a_gpu_reads_no_head_twice_and_copies_no_more_than_the_cache(
    begins: list[int],
    lengths: list[int],
    calls: list[tuple[int, int, bool]],
    alibi: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries that share keys go to the kernel as rows, over keys as they are held; masks are made
    once for both layers.
    """
    seen: list[tuple[Tensor, Any]] = []
    dot = F.scaled_dot_product_attention

    def watched(query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        assert not options.get("enable_gqa"), "kernels that take masks do not know groups"
        assert query.shape[1:] == (KV_HEADS, HEADS // KV_HEADS, DIM)
        assert keys.shape[1] == values.shape[1] == KV_HEADS
        seen.append((keys, options["attn_mask"]))
        return dot(query, keys, values, **options)

    monkeypatch.setattr("actors.attention.ragged.can_attend", lambda stored: False)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    torch.manual_seed(3)
    cache = KVCache(range(2), replace(SHAPE, tokens=115), CacheForm(torch.float32, CPU))
    slopes = torch.rand(HEADS) if alibi else None
    scoring = Scoring(0.3, None, slopes)
    whole = [torch.randn(n, 2 * KV_HEADS, DIM) for n in lengths]
    ends = np.array(lengths)
    slots, ones = np.arange(len(ends)), np.ones_like(ends)
    made = RaggedContext.of(cache, MicroBatch(slots, ends - 1, ones, np.array(begins)))
    for layer in range(2):
        for begin, each in zip(begins, whole, strict=True):
            place = MicroBatch(*np.array([[0], [0], [len(each)], [begin]]))
            cache.append(layer, cache.addresses(place), each[:, :KV_HEADS], each[:, KV_HEADS:])
        query = torch.randn(len(ends), HEADS, DIM)
        newest = torch.stack([each[-1] for each in whole])
        new = NewTokens(query, newest[:, :KV_HEADS], newest[:, KV_HEADS:])
        out = attend(made, layer, new, scoring)
        for row, each in enumerate(whole):
            own = query[row].expand(len(each), HEADS, DIM)
            key, value = each.split(KV_HEADS, 1)
            expected = written_out(own, key, value, 0.3, None, slopes)[-1]
            torch.testing.assert_close(out[row].double(), expected, atol=1e-5, rtol=1e-4)
    found = [(len(keys), keys.shape[2], mask is not None) for keys, mask in seen]
    assert found == 2 * [(*call[:2], call[2] or alibi) for call in calls]
    for (_, first), (_, second) in zip(seen[: len(calls)], seen[len(calls) :], strict=True):
        assert first is second or first.data_ptr() == second.data_ptr(), "it is made once"


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


def in_storage_of(stored: Tensor, read: Tensor) -> bool:
    return read.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize(
    ("slots", "starts", "cleared", "in_place"),
    [
        ([1, 2, 3], [2, 2, 2], [], True),
        ([1, 2, 3], [2, 7, 4], [1, 2, 3], True),
        ([1, 2, 3], [2, 7, 4], [1, 2], False),  # what follows the tokens of 3 is not known
        ([0, 2, 4], [5, 5, 5], [], True),
        ([0, 2, 4], [5, 1, 5], [0, 2, 4], True),
        ([0, 1, 4], [5, 5, 5], [], False),
        ([3, 1], [5, 5], [], False),
        ([4], [5], [], True),
    ],
)
def test_ranges_that_are_equally_far_apart_are_read_without_a_copy(
    slots: list[int], starts: list[int], cleared: list[int], in_place: bool, kv_bits: int
) -> None:
    """Shorter requests among them only where their rooms are known to reach as far."""
    torch.manual_seed(0)
    cache = KVCache(range(1), SHAPE, CacheForm(torch.float32, CPU, kv_bits))
    cache.clear([TokenRange(slot * LENGTH, LENGTH) for slot in cleared])
    new = torch.randn(len(slots), KV_HEADS, DIM)
    where = context(cache, slots, starts, [1] * len(slots)).where
    stored, _ = cache.append(0, where, new, new)
    stored.numbers.copy_(torch.arange(stored.numbers.numel()).view(stored.numbers.shape))
    read = where.read(stored.numbers)
    assert in_storage_of(stored.numbers, read) is in_place
    assert read.shape == (len(slots), KV_HEADS, max(starts) + 1, DIM)
    for row, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        own = stored.numbers[:, slot * LENGTH : slot * LENGTH + start + 1]
        assert torch.equal(read[row, :, : start + 1], own)
    if stored.scales is not None:
        assert where.read(stored.scales).shape == read.shape[:-1]


@pytest.mark.parametrize(
    ("slots", "starts", "counts", "blocks"),
    [
        ([1, 2, 3], [2, 2, 2], [1, 1, 1], 1),
        ([1, 3], [0, 0], [4, 4], 1),
        ([1, 2, 4], [0, 0, 0], [4, 4, 4], 3),
        ([3, 1], [0, 0], [4, 4], 2),
        ([1, 2, 3, 0], [7, 6, 0, 3], [1, 1, 5, 1], 2),
        ([1, 2, 4, 3], [7, 9, 0, 3], [1, 1, 5, 4], 3),
    ],
)
def test_new_tokens_are_written_in_blocks_where_they_can_be(
    slots: list[int], starts: list[int], counts: list[int], blocks: int
) -> None:
    cache = KVCache(range(1), SHAPE, CacheForm(torch.float32, CPU))
    where = context(cache, slots, starts, counts).where
    new = 1 + torch.arange(sum(counts) * KV_HEADS * DIM).view(-1, KV_HEADS, DIM).float()
    stored, _ = cache.append(0, where, new, new)
    expected = torch.zeros(KV_HEADS, SLOTS * LENGTH, DIM)
    rows = zip(slots, starts, new.split(counts), strict=True)
    for slot, start, tokens in rows:
        begin = slot * LENGTH + start
        expected[:, begin : begin + len(tokens)] = tokens.transpose(0, 1)
    assert torch.equal(stored.numbers, expected)
    assert len(where.blocks) == blocks
    elsewhere = Addresses.of(where.batch, torch.device("meta")).blocks
    assert len(elsewhere) == (1 if blocks == 1 else 0), "a GPU is told of everything at once"


def test_a_micro_batch_is_taken_apart_by_kind() -> None:
    cache = KVCache(range(1), SHAPE, CacheForm(torch.float32, CPU))

    def parts(starts: list[int], counts: list[int]) -> list[tuple[str, list[int]]]:
        made = context(cache, list(range(len(starts))), starts, counts)
        return [(part.kind, part.where.batch.slots.tolist()) for part in made.whole.parts]

    assert parts([3, 1], [1, 1]) == [("decode", [0, 1])]
    assert parts([0, 0], [4, 4]) == [("prompts", [0, 1])]
    assert parts([0, 0, 0], [4, 2, 4]) == [("prompts", [1]), ("prompts", [0, 2])]
    assert parts([0, 3, 2, 0, 9], [4, 1, 3, 4, 1]) == [
        ("decode", [1, 4]),
        ("prompts", [0, 3]),
        ("chunks", [2]),
    ]


def test_decode_steps_and_prompts_of_a_mixed_batch_take_one_call_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[tuple[str, int]] = []

    def attended(query: Tensor, *_: object) -> Tensor:
        called.append(("decode", len(query)))
        return query

    def dense(query: Tensor, *_: object, **__: object) -> Tensor:
        called.append(("dense", len(query)))
        return query

    monkeypatch.setattr(ragged, "attend_in_place", attended)
    monkeypatch.setattr(ragged, "_attention", dense)
    cache = KVCache(range(1), SHAPE, CacheForm(torch.float32, CPU))
    made = context(cache, [0, 1, 2, 3, 4], [3, 0, 5, 0, 2], [1, 4, 1, 4, 3])
    query, key = torch.randn(13, HEADS, DIM), torch.randn(13, KV_HEADS, DIM)
    out = attend(made, 0, NewTokens(query, key, key), Scoring(0.3))
    assert called == [("decode", 2), ("dense", 2), ("dense", 1)]
    assert torch.equal(out, query), "rows go back to where they came from"
