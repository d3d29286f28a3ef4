"""Constant states of requests: the gated delta rule against float64, and rows of slots that park,
move to other slots and are taken by others.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from actors.attention.delta import rule as delta_rule
from actors.attention.delta.states import ConstantStates, DeltaWeights, Projected, TokenRuns
from actors.attention.kv_cache import CacheForm, CacheShape, KVCache
from actors.attention.ragged import RaggedContext
from actors.messages import Admission, MicroBatch, Park, Sampling, TokenRange
from planner.model.layer_parts import DeltaMixer

SIZES = DeltaMixer(key_heads=2, value_heads=4, key_dim=8, value_dim=40, conv_width=4)
LENGTHS = (4, 71, 1, 34, 9)
PARTS = ((1, 60, 1, 30, 9), (1, 5, 0, 1, 0), (1, 5, 0, 2, 0), (1, 1, 0, 1, 0))
"""New tokens of each request in a micro-batch: parts of prompts go on in the second, then steps."""
LAYER = 3
CPU = torch.device("cpu")

Floats = npt.NDArray[np.float64]


def cache_of(slots: int, dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache of layers 2 and 3, of which the latter has states."""
    states = ConstantStates([LAYER], SIZES, slots, dtype, CPU)
    return KVCache(range(2, 4), CacheShape(64, 1, 8), CacheForm(dtype, CPU), 99, states=states)


def projected(tokens: int, seed: int, sizes: DeltaMixer = SIZES) -> Projected:
    draw = torch.Generator().manual_seed(seed)
    heads = sizes.value_heads
    widths = sizes.conv_channels, sizes.value_width, heads, heads
    return Projected(*(torch.randn(tokens, width, generator=draw) for width in widths))


def weights_of(sizes: DeltaMixer = SIZES, dtype: torch.dtype = torch.float32) -> DeltaWeights:
    """Random ones of slow decay."""
    draw = torch.Generator().manual_seed(9)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    made = delta_rule.random_weights(sizes, random)
    return replace(made, rates=made.rates * 0.05)


def wanted_of(new: Projected, weights: DeltaWeights) -> Floats:
    """The rule as it is written (Gated Delta Networks, equation 10), of one request."""
    sizes = weights.sizes
    mixed, gate, beta, decay = (each.double().numpy() for each in new)
    taps, norm, rates, biases = (
        each.double().numpy()
        for each in (weights.taps, weights.norm_weight, weights.rates, weights.biases)
    )
    padded = np.concatenate([np.zeros((sizes.conv_width - 1, sizes.conv_channels)), mixed])
    total = sum(padded[tap : tap + len(mixed)] * taps[tap] for tap in range(sizes.conv_width))
    convolved = total / (1 + np.exp(-total))
    query, key, value = np.split(convolved, [sizes.key_width, 2 * sizes.key_width], axis=1)
    state = np.zeros((sizes.value_heads, sizes.key_dim, sizes.value_dim))
    out = np.empty((len(mixed), sizes.value_heads, sizes.value_dim))
    for token in range(len(mixed)):
        for head in range(sizes.value_heads):
            own = head // (sizes.value_heads // sizes.key_heads) * sizes.key_dim
            q, k = (each[token, own : own + sizes.key_dim] for each in (query, key))
            q = q / np.sqrt(q @ q + 1e-6) / np.sqrt(sizes.key_dim)
            k = k / np.sqrt(k @ k + 1e-6)
            v = value[token].reshape(sizes.value_heads, -1)[head]
            step = np.log1p(np.exp(decay[token, head] + biases[head]))
            held = state[head] * np.exp(rates[head] * step)
            rate = 1 / (1 + np.exp(-beta[token, head]))
            state[head] = held + np.outer(k, rate * (v - k @ held))
            found = q @ state[head]
            out[token, head] = found / np.sqrt((found**2).mean() + weights.norm_eps) * norm
    return (out * (gate / (1 + np.exp(-gate))).reshape(out.shape)).reshape(len(mixed), -1)


def mixed_in_parts(
    cache: KVCache, slots: list[int], inputs: list[Projected], weights: DeltaWeights
) -> list[Floats]:
    """What `mix` makes of each request's tokens, given in parts with those of others."""
    found: list[list[Floats]] = [[] for _ in inputs]
    done = np.zeros(len(inputs), dtype=np.int64)
    for counts in np.array(PARTS):
        rows = np.flatnonzero(counts)
        own = counts[rows]
        batch = MicroBatch(np.array(slots)[rows], done[rows], own, rows * 0)
        assert cache.states is not None
        cache.states.follow(batch)
        news = [
            inputs[row].of(slice(start, start + count))
            for row, start, count in zip(rows, done[rows], own, strict=True)
        ]
        new = Projected(*(torch.cat(parts) for parts in zip(*news, strict=True)))
        out = delta_rule.mix(RaggedContext.of(cache, batch), LAYER, new, weights)
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
    cache, weights = cache_of(len(LENGTHS)), weights_of()
    for seed in (0, 1):  # the second time after others
        inputs = [projected(length, 10 * seed + i) for i, length in enumerate(LENGTHS)]
        slots = [3, 0, 4, 1, 2]
        for own, found in zip(inputs, mixed_in_parts(cache, slots, inputs, weights), strict=True):
            wanted = wanted_of(own, weights)
            assert np.abs(found - wanted).max() < 5e-5 * np.abs(wanted).max()


def test_neighbours_that_follow_each_other_are_one_run() -> None:
    """As deterministic stages have them, a token a request; rows behind them are nobody's."""
    batch = MicroBatch(*np.array([[2, 2, 2, 0, 0], [0, 1, 2, 7, 8], [1] * 5, [0, 0, 0, 50, 50]]))
    assert TokenRuns.of(batch, CPU).told.tolist() == [[2, 0], [0, 7], [0, 3], [3, 2]]
    inputs, weights = projected(14, 5), weights_of()
    whole = MicroBatch(*np.array([[0], [0], [12], [0]]))
    context = RaggedContext.of_tokens(cache_of(1), whole.by_token)
    found = delta_rule.mix(context, LAYER, inputs, weights).double().numpy()
    wanted = wanted_of(inputs.of(slice(12)), weights)
    assert np.abs(found[:12] - wanted).max() < 1e-4
    assert not found[12:].any()


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
