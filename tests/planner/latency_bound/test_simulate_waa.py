"""The simulated events of WAA, with lengths all alike, against seconds computed by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from planner.latency_bound.simulate import ObservedRequests, RequestWatch, simulate_waa
from planner.latency_bound.waa_sides import Handover, StageCopies, WaaSides
from planner.lengths import FloatArray, LengthDistribution, RequestLengths
from planner.scheduling import RequestSchedule

PROMPT, ANSWER = 100, 11


@dataclass(frozen=True)
class _OneStage:
    """A stage whose prefills take so long for each request, and all decode steps the same."""

    prompt_s: float
    step_s: float
    stages: int = 1

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.array([requests * self.prompt_s])

    def attention_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.zeros(1)

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        return np.array([self.step_s])

    def prefill_hop_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.zeros(1)

    def decode_hop_s(self, requests: float) -> FloatArray:
        return np.zeros(1)


NOTHING = StageCopies(np.zeros(1), np.zeros(1))


def _observed(
    prompt_s: float,
    token_s: float,
    answer: int = ANSWER,
    decoding: int = 1,
    keep: StageCopies = NOTHING,
    restore: StageCopies = NOTHING,
) -> ObservedRequests:
    """Steps of a second, turns of one prompt."""
    lengths = RequestLengths(
        LengthDistribution((PROMPT,), (1.0,)), LengthDistribution((answer,), (1.0,))
    )
    schedule = RequestSchedule("waa-c", 1, decoding, 1, 1, 1, float(PROMPT))
    times, generator = _OneStage(prompt_s, 1.0), np.random.default_rng(0)
    sides = WaaSides(times, times, Handover(keep, restore, 0.0, token_s), lengths)
    return simulate_waa(sides, schedule, RequestWatch(50, 200), generator)


def test_slow_prefills_decide_how_many_requests_are_served() -> None:
    """A prompt every 20 s is handed over in 1 s and makes its 10 steps alone; it waits behind one
    other, which is being prefilled when it is submitted.
    """
    seen = _observed(20.0, 0.01, decoding=8)
    assert seen.requests_per_s == pytest.approx(1 / 20)
    assert seen.latencies_s == pytest.approx(np.full(len(seen.latencies_s), 20 + 20 + 1 + 10))


def test_slow_steps_decide_how_many_requests_are_served() -> None:
    """All of 20 places are taken, as prompts take no time to speak of: 20 requests in 10 s."""
    seen = _observed(1e-6, 0.0, decoding=20)
    assert 20 / 10 <= seen.requests_per_s <= 1.1 * 20 / 10
    assert seen.latencies_s.min() >= 10
    assert seen.latencies_s.max() <= 11 + 1e-3


def test_slow_handovers_decide_how_many_requests_are_served() -> None:
    """One prompt after the other is handed over in 20 s."""
    assert _observed(1.0, 0.2, decoding=8).requests_per_s == pytest.approx(1 / 20, rel=0.02)


def test_answers_of_one_token_end_with_their_prefill() -> None:
    """They are not handed over, so that its seconds do not count. Where one may be in flight, the
    next one begins when it has ended.
    """
    seen = _observed(2.0, 1000.0, answer=1)
    assert seen.requests_per_s == pytest.approx(1 / 2)
    assert set(np.round(seen.latencies_s, 6)) == {2.0}


def test_stages_that_prefill_copy_what_they_have_computed() -> None:
    """A prompt of 100 tokens takes 20 s, and 2 + 100 * 0.03 s of copies."""
    seen = _observed(20.0, 0.0, decoding=8, keep=StageCopies(np.array([2.0]), np.array([0.03])))
    assert seen.requests_per_s == pytest.approx(1 / 25)
    assert seen.latencies_s == pytest.approx(np.full(len(seen.latencies_s), 25 + 25 + 10))


def test_a_step_that_requests_join_is_longer_by_their_copies() -> None:
    """One request at a time decodes for 10 s, and is copied for 5 s before; the next one's prompt
    is prefilled meanwhile.
    """
    copies = StageCopies(np.array([2.0]), np.array([0.03]))
    seen = _observed(1e-6, 0.0, restore=copies)
    assert seen.latencies_s == pytest.approx(np.full(len(seen.latencies_s), 15.0))


def test_answers_of_one_token_are_not_copied() -> None:
    copies = StageCopies(np.array([1000.0]), np.array([1000.0]))
    seen = _observed(2.0, 0.0, answer=1, keep=copies, restore=copies)
    assert set(np.round(seen.latencies_s, 6)) == {2.0}
