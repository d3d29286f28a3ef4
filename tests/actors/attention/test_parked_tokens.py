"""Keys and values that are parked in host memory, and ranges that were given to others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.attention.kv_cache import CacheForm, CacheShape, KVCache
from actors.messages import EVERY_KEY, Admission, MicroBatch, Move, Park, Sampling, TokenRange
from tests.actors.batches import batch_in_ranges


def held_cache(kv_bits: int, parked_tokens: int = 20, rotated: int = 0) -> KVCache:
    """A cache of 32 token slots with random content, two layers."""
    torch.manual_seed(0)
    form = CacheForm(torch.float32, torch.device("cpu"), kv_bits)
    cache = KVCache(range(2), CacheShape(32, 2, 8, rotated=rotated), form, parked_tokens)
    where = cache.addresses(batch_in_ranges([0], [0], [32]))
    for layer in range(2):
        cache.append(layer, where, *torch.randn(2, 32, 2, 8))
    return cache


def content(cache: KVCache, begin: int, tokens: int) -> list[torch.Tensor]:
    return [part.clone() for each in cache._all() for part in each.of_tokens(begin, tokens)]


def admission(slot: int, begin: int, size: int) -> Admission:
    return Admission(slot, str(slot), 9, Sampling(), room=TokenRange(begin, size))


def step(
    slot: int, start: int, begin: int, size: int, count: int = 1, **changes: object
) -> MicroBatch:
    """A micro-batch of one request."""
    arrays = (np.array([each]) for each in (slot, start, count, begin))
    return replace(MicroBatch(*arrays, sizes=np.array([size])), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("rotated", [0, 2])
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_what_is_parked_comes_back_bit_for_bit(kv_bits: int, rotated: int) -> None:
    """Also where others move to its place in the micro-batch that parks it, and its new range lies
    where it was cleared in the one that restores it.
    """
    cache = held_cache(kv_bits, rotated=rotated)
    cache._rooms.follow(step(0, 0, 4, 10, admitted=(admission(0, 4, 10),)))
    cache._rooms.follow(step(1, 0, 20, 6, admitted=(admission(1, 20, 6),)))
    before, other = content(cache, 4, 7), content(cache, 20, 5)
    cache.prepare(step(1, 5, 3, 6, parks=(Park(5, 4, 7),), moves=(Move(20, 3, 5),)))
    assert all(map(torch.equal, content(cache, 3, 5), other))
    assert not all(map(torch.equal, content(cache, 4, 7), before))
    assert cache.parked.tokens == 7
    cache.prepare(step(0, 7, 12, 9, admitted=(admission(0, 12, 9),), restores=(Park(5, 12, 7),)))
    assert all(map(torch.equal, content(cache, 12, 7), before))
    assert cache.parked.tokens == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_copies_of_a_gpu_are_pinned_and_keep_their_order(kv_bits: int) -> None:
    """Queued without waiting between kernels that write to the same token slots."""
    form = CacheForm(torch.float16, torch.device("cuda"), kv_bits)
    tokens = 4096
    cache = KVCache(range(8), CacheShape(2 * tokens, 8, 128), form, tokens)
    where = cache.addresses(batch_in_ranges([0], [0], [2 * tokens], slot_tokens=2 * tokens))
    for layer in range(8):
        cache.append(layer, where, *torch.randn(2, 2 * tokens, 8, 128, device="cuda").half())
    rooms = admission(0, 0, tokens), admission(1, tokens, tokens)
    for each in rooms:
        cache._rooms.follow(step(each.slot, 0, each.room.begin, tokens, admitted=(each,)))
    before = content(cache, 0, tokens - 1)
    cache.prepare(step(1, 5, tokens, tokens, parks=(Park(0, 0, tokens - 1),)))
    assert all(copy.is_pinned() for _, copies in cache.parked._held.values() for copy in copies)
    back = Park(0, tokens, tokens - 1)
    cache.prepare(step(2, 0, 0, tokens, admitted=(admission(2, 0, tokens),)))
    there = admission(3, tokens, tokens)
    cache.prepare(step(3, 9, tokens, tokens, admitted=(there,), restores=(back,)))
    assert all(map(torch.equal, content(cache, tokens, tokens - 1), before))


def test_parked_tokens_are_bounded_and_dropped() -> None:
    cache = held_cache(16, parked_tokens=9)
    for slot, begin in enumerate((0, 8, 16)):
        cache._rooms.follow(step(slot, 0, begin, 8, admitted=(admission(slot, begin, 8),)))
    cache.prepare(step(2, 1, 16, 8, parks=(Park(0, 0, 5),)))
    with pytest.raises(RuntimeError, match="5 tokens are to be parked as number 1 beside 5; at"):
        cache.prepare(step(2, 2, 16, 8, parks=(Park(1, 8, 5),)))
    cache.prepare(step(2, 2, 16, 8, parks=(Park(1, 8, 5),), drops=(0, 7)))
    assert cache.parked.tokens == 5
    with pytest.raises(RuntimeError, match="4 parked tokens are wanted of number 1, which has 5"):
        cache.prepare(step(0, 4, 0, 8, admitted=(admission(0, 0, 8),), restores=(Park(1, 0, 4),)))
    cache.prepare(step(2, 3, 16, 8, drops=(EVERY_KEY,)))
    assert cache.parked.tokens == 0


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (step(0, 8, 0, 8), "slot 0 would have 9 tokens from token slot 0 on, in a range of 8"),
        (step(0, 3, 1, 8), "4 tokens from token slot 1 on, in a range of 8; it was given 8 from 0"),
        (step(0, 3, 0, 7), "in a range of 7; it was given 8"),
        (step(5, 3, 0, 8), r"it was given 0 .* was given to another"),
        (step(2, 3, 16, 17), "17 token slots from 16 on, of 32"),
        (step(3, 0, 28, 5, admitted=(admission(3, 28, 5),)), "5 token slots from 28 on, of 32"),
        (step(0, 3, 0, 8, parks=(Park(1, 9, 2),)), "no request has 2 tokens from token slot 9 on"),
        (step(0, 3, 0, 8, parks=(Park(1, 8, 9),)), "no request has 9 tokens from token slot 8 on"),
        (step(0, 3, 0, 8, moves=(Move(9, 24, 1),)), "no request has 1 tokens"),
        (step(2, 3, 25, 8, moves=(Move(16, 25, 3),)), "8 token slots from 25 on, of 32"),
        (
            step(3, 0, 24, 8, admitted=(admission(3, 24, 8),), restores=(Park(1, 23, 2),)),
            "no request has 2 tokens",
        ),
    ],
)
def test_tokens_outside_of_their_ranges_are_refused(batch: MicroBatch, said: str) -> None:
    cache = held_cache(16)
    for slot, begin in enumerate((0, 8, 16)):
        cache._rooms.follow(step(slot, 0, begin, 8, admitted=(admission(slot, begin, 8),)))
    with pytest.raises(RuntimeError, match=said):
        cache.prepare(batch)


def test_a_range_that_was_given_to_another_cannot_be_used() -> None:
    """By an admission, by growth and by a move; who ended is not computed again, and may be
    overwritten.
    """
    for taking in (
        step(2, 0, 7, 4, admitted=(admission(2, 7, 4),)),
        step(0, 8, 0, 9),
        step(3, 7, 13, 8, moves=(Move(16, 13, 8),)),
    ):
        cache = held_cache(16)
        for slot, begin in ((0, 0), (1, 8), (3, 16)):
            cache._rooms.follow(step(slot, 0, begin, 8, admitted=(admission(slot, begin, 8),)))
        cache.prepare(taking)
        with pytest.raises(RuntimeError, match="was given to another"):
            cache.prepare(step(1, 4, 8, 8))
