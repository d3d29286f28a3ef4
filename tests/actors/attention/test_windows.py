"""Rooms of windows against a cache of all tokens, and their bytes against the plan's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.attention.addresses import Scoring
from actors.attention.kv_cache import CacheForm, CacheShape, KVCache
from actors.attention.ragged import NewTokens, RaggedContext, attend
from actors.attention.stored import Stored
from actors.messages import MicroBatch, Park, TokenRange
from planner.costs.memory import StageWork, _scratch_bytes
from planner.costs.stored_bytes import kv_cache_bytes_per_layer
from planner.costs.temporaries import scratch_tokens
from planner.model.finding import model_shape
from planner.workload import MicroBatches, Workload, window_room
from tests.actors.configs import EVERY_CONFIG, LAYERS
from tests.actors.models import save_tiny, stages_of

CPU = torch.device("cpu")
WINDOW, SLOTS, TOKENS = 7, 4, 90
ROOM = 14
FULL, SEEING, READING = range(3)
"""Layers: one that sees all tokens, one that sees a window, and one that reads the keys of it."""


def cache_of(kv_bits: int, rooms: dict[int, int]) -> KVCache:
    shape = CacheShape(SLOTS * TOKENS, 2, 8, {READING: None}, {READING: SEEING})
    form = CacheForm(torch.float32, CPU, kv_bits, SLOTS, windows={SEEING: WINDOW}, rooms=rooms)
    return KVCache(range(3), shape, form, parked_tokens=2 * TOKENS)


def attended(
    cache: KVCache, batch: MicroBatch, new: NewTokens, by_token: bool
) -> list[torch.Tensor]:
    cache.prepare(batch)
    context = (
        RaggedContext.of_tokens(cache, batch.by_token)
        if by_token
        else RaggedContext.of(cache, batch)
    )
    windows = (None, WINDOW, WINDOW)
    return [
        attend(context, layer, new, Scoring(0.3, window)) for layer, window in enumerate(windows)
    ]


@pytest.mark.parametrize(("kv_bits", "seed"), [(16, 0), (16, 1), (8, 2)])
def test_passes_attend_as_over_all_tokens(
    kv_bits: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, parts and steps of any sizes in one pass; requests end, come, and are parked."""
    monkeypatch.setattr("actors.attention.ragged.can_attend", lambda _: False)
    rng, draw = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    caches = cache_of(kv_bits, {SEEING: ROOM}), cache_of(kv_bits, {})
    lengths, seen = dict.fromkeys(range(SLOTS), 0), set[tuple[bool, ...]]()
    for step in range(60):
        chosen = np.sort(rng.choice(SLOTS, rng.integers(1, SLOTS + 1), replace=False))
        parks, restores = (), ()
        for slot in chosen.tolist():
            if lengths[slot] > TOKENS // 2:
                lengths[slot] = 0
        if step % 7 == 3 and lengths[int(chosen[0])]:
            slot = int(chosen[0])
            parks = restores = (Park(step, slot * TOKENS, lengths[slot]),)
        starts = np.array([lengths[slot] for slot in chosen.tolist()])
        counts = rng.choice([1, 1, 1, 2, 9, 17, 30], len(chosen))
        batch = MicroBatch(chosen, starts, counts, chosen * TOKENS)
        for cache in caches:
            for slot in chosen.tolist():
                cache._rooms._make_room(slot + 1)
                cache._rooms._give(slot, TokenRange(slot * TOKENS, TOKENS))
        batch = replace(batch, parks=parks, restores=restores)
        rows = int(counts.sum())
        new = NewTokens(*(torch.randn(rows, n, 8, generator=draw) for n in (4, 2, 2)))
        found, wanted = (attended(cache, batch, new, step % 5 == 0) for cache in caches)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        entered = caches[0].enter(batch.of_rows(slice(0, 0)))[WINDOW]
        assert entered.scratch is None
        lengths |= dict(zip(chosen.tolist(), (starts + counts).tolist(), strict=True))
        kept = np.minimum(starts, WINDOW - 1)
        is_long = kept + counts > ROOM
        seen.add((bool(is_long.any()), bool(is_long.all()), bool(starts.any())))
        most = int((np.where(is_long, kept, 0) + counts).sum())
        assert not is_long.any() or most <= scratch_tokens(ROOM, WINDOW, rows, len(chosen))
    assert seen >= {(False, False, True), (True, False, True), (True, True, True)}


def test_a_request_that_goes_on_elsewhere_is_an_error() -> None:
    cache = cache_of(16, {SEEING: ROOM})
    ones = np.ones(1, np.int64)
    cache.enter(MicroBatch(0 * ones, 0 * ones, 5 * ones, 0 * ones))
    cache.enter(MicroBatch(0 * ones, 4 * ones, ones, 0 * ones))  # computed again
    with pytest.raises(RuntimeError, match="slot 0 goes on at token 6, but its window has 0 to 5"):
        cache.enter(MicroBatch(0 * ones, 6 * ones, ones, 0 * ones))
    with pytest.raises(RuntimeError, match=r"slot 4, of 4 that have windows"):
        cache.enter(MicroBatch(4 * ones, 0 * ones, ones, 0 * ones))


def scratch_bytes(cache: KVCache, work: StageWork) -> int:
    """What the layers of a cache take of a scratch for the whole prompts of a prefill."""
    rows = np.arange(work.sizes.prefill)
    counts = np.full_like(rows, work.workload.prompt_length)
    passes = cache.enter(MicroBatch(rows, 0 * rows, counts, rows * work.workload.total_length))
    held: dict[int, Stored] = {}
    for layer in cache.holding_layers:
        scratch = passes[window].scratch if (window := cache.window_of(layer)) else None
        if scratch is not None:
            own = scratch.of_layer(layer, cache.of_layer(layer), cache.is_shared(layer))
            held |= {each.numbers.data_ptr(): each for each in own}
    return sum(each.nbytes for each in held.values())


@pytest.mark.parametrize("name", ["gpt_oss", "gemma4"])
def test_planned_bytes_are_those_of_rooms(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, EVERY_CONFIG[name])
    shape = model_shape(tmp_path)
    for kv_bits, longest in ((16, 100), (8, 100), (16, 12)):
        workload = Workload(SLOTS, longest - 4, 4)
        stages = stages_of(tmp_path, (0, LAYERS), SLOTS, longest, kv_bits=kv_bits)
        planned = sum(
            kv_cache_bytes_per_layer(shape.layer(n), workload, kv_bits, "float32")
            for n in range(LAYERS)
        )
        assert stages[0].stats().kv_cache_bytes == planned
        whole = sum(
            kv_cache_bytes_per_layer(
                replace(shape.layer(n), sliding_window=None), workload, kv_bits, "float32"
            )
            for n in range(LAYERS)
        )
        assert (planned < whole) == (longest == 100)
        work = StageWork(shape, workload, MicroBatches(2, 2), "float32", kv_bits=kv_bits)
        taken = scratch_bytes(stages[0]._cache, work)
        assert _scratch_bytes(work) == taken
        assert (taken > 0) == (longest == 100)


def test_rooms_are_made_where_they_are_smaller() -> None:
    assert window_room(None, 4, 10**6) is None
    assert window_room(1024, 4, 4 * 1152) is None
    assert window_room(1024, 4, 4 * 1152 + 1) == 1152
    assert window_room(128, 1, 4096) == 192
    assert Workload(8, 1000, 200, n_slots=8 * 150).room(128) is None  # short ones, in the mean
