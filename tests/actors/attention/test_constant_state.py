"""Constant states of requests: the gated delta rule against float64, and rows of slots that park,
move to other slots and are taken by others.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from actors.attention import delta_rule
from actors.attention.constant_state import ConstantStates, DeltaInputs, TokenRuns
from actors.attention.kv_cache import CacheForm, CacheShape, KVCache
from actors.attention.ragged import RaggedContext
from actors.messages import Admission, MicroBatch, Park, Sampling, TokenRange
from planner.model.layer_parts import DeltaMixer

SIZES = DeltaMixer(key_heads=2, value_heads=4, key_dim=8, value_dim=40, conv_width=4)
LENGTHS = (3, 70, 1, 33, 9)
PARTS = ((1, 60, 1, 30, 9), (1, 5, 0, 1, 0), (1, 5, 0, 2, 0))
"""New tokens of each request in a micro-batch; a second one goes on with parts of prompts."""
LAYER = 3
CPU = torch.device("cpu")

Floats = npt.NDArray[np.float64]


def cache_of(slots: int, dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache of layers 2 and 3, of which the latter has states."""
    states = ConstantStates([LAYER], SIZES, slots, dtype, CPU)
    return KVCache(range(2, 4), CacheShape(64, 1, 8), CacheForm(dtype, CPU), 99, states=states)


def random_inputs(tokens: int, seed: int) -> DeltaInputs:
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, SIZES.conv_channels, generator=draw)
    rates = torch.rand(2, tokens, SIZES.value_heads, generator=draw)
    return DeltaInputs(mixed, -0.1 * rates[0], rates[1])


TAPS = torch.randn(4, SIZES.conv_channels, generator=torch.Generator().manual_seed(9))


def wanted_of(new: DeltaInputs) -> Floats:
    """The rule as it is written (Gated Delta Networks, equation 10), of one request."""
    mixed, log_decay, beta = (
        each.double().numpy() for each in (new.mixed, new.log_decay, new.beta)
    )
    padded = np.concatenate([np.zeros((SIZES.conv_width - 1, SIZES.conv_channels)), mixed])
    taps = TAPS.double().numpy()
    total = sum(padded[tap : tap + len(mixed)] * taps[tap] for tap in range(SIZES.conv_width))
    convolved = total / (1 + np.exp(-total))
    query, key, value = np.split(convolved, [SIZES.key_width, 2 * SIZES.key_width], axis=1)
    state = np.zeros((SIZES.value_heads, SIZES.key_dim, SIZES.value_dim))
    out = np.empty((len(mixed), SIZES.value_heads, SIZES.value_dim))
    for token in range(len(mixed)):
        for head in range(SIZES.value_heads):
            own = head // (SIZES.value_heads // SIZES.key_heads) * SIZES.key_dim
            q, k = (each[token, own : own + SIZES.key_dim] for each in (query, key))
            q = q / np.sqrt(q @ q + 1e-6) / np.sqrt(SIZES.key_dim)
            k = k / np.sqrt(k @ k + 1e-6)
            v = value[token].reshape(SIZES.value_heads, -1)[head]
            held = state[head] * np.exp(log_decay[token, head])
            state[head] = held + np.outer(k, beta[token, head] * (v - k @ held))
            out[token, head] = q @ state[head]
    return out


def of_rows(inputs: DeltaInputs, rows: slice) -> DeltaInputs:
    return DeltaInputs(inputs.mixed[rows], inputs.log_decay[rows], inputs.beta[rows])


def joined(parts: list[DeltaInputs]) -> DeltaInputs:
    names = ("mixed", "log_decay", "beta")
    return DeltaInputs(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def mixed_in_parts(cache: KVCache, slots: list[int], inputs: list[DeltaInputs]) -> list[Floats]:
    """What `mix` makes of each request's tokens, given in parts with those of others."""
    found: list[list[Floats]] = [[] for _ in inputs]
    done = np.zeros(len(inputs), dtype=np.int64)
    for counts in np.array(PARTS):
        rows = np.flatnonzero(counts)
        own = counts[rows]
        batch = MicroBatch(np.array(slots)[rows], done[rows], own, rows * 0)
        cache.states.follow(batch)
        news = [
            of_rows(inputs[row], slice(start, start + count))
            for row, start, count in zip(rows, done[rows], own, strict=True)
        ]
        out = delta_rule.mix(RaggedContext.of(cache, batch), LAYER, joined(news), TAPS, SIZES)
        for row, part in zip(rows, out.split(own.tolist()), strict=True):
            found[row].append(part.double().numpy())
        done += counts
    assert done.tolist() == list(LENGTHS)
    return [np.concatenate(parts) for parts in found]


@pytest.mark.parametrize("compiled", [True, False])
def test_each_request_is_as_alone_in_float64_whatever_was_in_its_slot(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(delta_rule, "can_run", lambda device: False)
    cache = cache_of(len(LENGTHS))
    for seed in (0, 1):  # the second time after others
        inputs = [random_inputs(length, 10 * seed + i) for i, length in enumerate(LENGTHS)]
        slots = [3, 0, 4, 1, 2]
        for own, found in zip(inputs, mixed_in_parts(cache, slots, inputs), strict=True):
            wanted = wanted_of(own)
            assert np.abs(found - wanted).max() < 2e-5 * np.abs(wanted).max()


def test_neighbours_that_follow_each_other_are_one_run() -> None:
    """As deterministic stages have them, a token a request."""
    batch = MicroBatch(*np.array([[2, 2, 2, 0, 0], [0, 1, 2, 7, 8], [1] * 5, [0, 0, 0, 50, 50]]))
    assert TokenRuns.of(batch, CPU).told.tolist() == [[2, 0], [0, 7], [0, 3], [3, 2]]
    inputs = random_inputs(12, 5)
    cache = cache_of(1)
    whole = MicroBatch(*np.array([[0], [0], [12], [0]]))
    context = RaggedContext.of_tokens(cache, whole.by_token)
    found = delta_rule.mix(context, LAYER, inputs, TAPS, SIZES)
    assert np.abs(found.double().numpy() - wanted_of(inputs)).max() < 1e-4


def test_a_token_is_never_taken_in_twice() -> None:
    states = ConstantStates([LAYER], SIZES, 2, torch.float32, CPU)
    prompt = MicroBatch(*np.array([[1], [0], [5], [0]]))
    step = MicroBatch(*np.array([[1], [5], [1], [0]]))
    states.follow(prompt)
    states.follow(step)
    with pytest.raises(RuntimeError, match="in slot 1 goes on at token 5, but its state is of 6"):
        states.follow(step)
    states.follow(prompt)  # from its beginning it may be computed at any time
    with pytest.raises(RuntimeError, match="in slot 2, of 2 that have states"):
        states.follow(MicroBatch(*np.array([[2], [0], [5], [0]])))


def test_what_is_parked_comes_back_in_another_slot() -> None:
    cache = cache_of(3, torch.bfloat16)
    assert cache.nbytes == 64 * 8 * 2 * 2 + 3 * (4 * 8 * 40 * 4 + 3 * SIZES.conv_channels * 2)
    states = cache.states
    assert states is not None
    room = TokenRange(8, 20)

    def batch(slot: int, start: int, count: int, begin: int) -> MicroBatch:
        return MicroBatch(*np.array([[slot], [start], [count], [begin]]))

    def admitted(slot: int, room: TokenRange) -> tuple[Admission, ...]:
        return (Admission(slot, str(slot), 9, Sampling(), room=room),)

    cache.prepare(replace(batch(1, 0, 7, 8), admitted=admitted(1, room)))
    for held in states.of_slot(1):
        held.normal_()
    before = [each.clone() for each in states.of_slot(1)]
    other = TokenRange(40, 20)
    parks = (Park(5, 8, 7),)
    cache.prepare(replace(batch(0, 0, 3, 8), admitted=admitted(0, room), parks=parks))
    states.recurrent[:, :2] = states.inputs[:, :2] = torch.nan
    back = replace(batch(2, 7, 1, 40), admitted=admitted(2, other), restores=(Park(5, 40, 7),))
    cache.prepare(back)
    assert all(map(torch.equal, states.of_slot(2), before))
    cache.keep(replace(batch(2, 8, 1, 40), keeps=(Park(6, 40, 8),)))
    kept = cache.parked.found(6)
    assert kept is not None
    assert all(map(torch.equal, kept.copies[-2:], before))
