"""Timelines beside simulations of the same schedules' events, and beside closed forms."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from benchmarks.reproduction.latency_bounds.timelines import of_rra, of_waa, random_waa
from planner.latency_bound.placed_layers import Handover, StageCopies, WaaSides
from planner.latency_bound.rra_timeline import rra_timeline
from planner.latency_bound.waa_timeline import busy_prefills, waa_timeline
from planner.lengths import FloatArray, LengthDistribution, RequestLengths
from planner.scheduling import RequestSchedule

ALIKE = RequestLengths(LengthDistribution((10,), (1.0,)), LengthDistribution((5,), (1.0,)))


@dataclass(frozen=True)
class _OneStage:
    """A stage with a prefill of so many seconds for each request and decode steps of 1 s."""

    prompt_s: float = 2.0
    stages: int = 1

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.array([self.prompt_s * requests])

    def attention_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.zeros(1)

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        return np.array([1.0])

    def prefill_hop_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.zeros(1)

    def decode_hop_s(self, requests: float) -> FloatArray:
        return np.zeros(1)


@pytest.mark.parametrize("seed", [0, 2, 4, 13])
def test_rra_is_near_its_events(seed: int) -> None:
    found = of_rra(seed, 2500)
    assert abs(found.requests_per_s) < 0.05
    assert abs(found.latency) < 0.15, "of 2,500 requests 25 are above the quantile"


@pytest.mark.parametrize("seed", [2, 5])
def test_waa_is_near_its_events(seed: int) -> None:
    found = of_waa(seed, 1500)
    assert abs(found.requests_per_s) < 0.05
    assert abs(found.latency) < 0.15


def test_rra_of_requests_that_are_alike() -> None:
    """Three prompts of 2 s each together, then the four steps that all of them make."""
    schedule = RequestSchedule("rra", 3, 3, 4, 1, 3, 10.0)
    found = rra_timeline(_OneStage(), ALIKE, schedule, 0.99)
    assert found.performance.requests_per_s == pytest.approx(3 / 10)
    assert found.performance.latency_s == pytest.approx(10)


def _sides(
    prompt_s: float = 2.0, token_s: float = 0.0, keep_s: float = 0.0, restore_s: float = 0.0
) -> WaaSides:
    """One stage for either phase; messages of so many seconds a token, and copies of each request
    on the stages.
    """
    copies = (StageCopies(np.array([each]), np.zeros(1)) for each in (keep_s, restore_s))
    handover = Handover(*copies, 0.0, token_s)
    return WaaSides(_OneStage(prompt_s), _OneStage(), handover, ALIKE)


def _waa(decode_requests: int) -> RequestSchedule:
    return RequestSchedule("waa-c", 1, decode_requests, 1, 1, 1, 10.0)


def test_waa_that_prefills_too_slowly() -> None:
    """Two prefills are under way on the one stage, so that each takes twice its time; then comes
    half of a step until one ends, and four steps.
    """
    found = waa_timeline(_sides(), _waa(100), 0.99).performance
    assert found.requests_per_s == pytest.approx(1 / 2)
    assert found.latency_s == pytest.approx(4 + 0.5 + 4, rel=1e-3)


def test_waa_that_keeps_keys_and_values() -> None:
    """A prompt of 2 s is copied for half a second after it."""
    found = waa_timeline(_sides(keep_s=0.5), _waa(100), 0.99).performance
    assert found.requests_per_s == pytest.approx(1 / 2.5)
    assert found.latency_s == pytest.approx(5 + 0.5 + 4, rel=1e-3)


def test_waa_that_hands_over_too_slowly() -> None:
    """A message for each prompt of ten tokens takes 4 s."""
    found = waa_timeline(_sides(token_s=0.4), _waa(100), 0.99).performance
    assert found.requests_per_s == pytest.approx(1 / 4)


def test_waa_that_decodes_too_slowly() -> None:
    """Of 20 requests each makes four steps of one second; their prefills wait for nobody."""
    found = waa_timeline(_sides(prompt_s=1e-4), _waa(20), 0.99).performance
    assert found.requests_per_s == pytest.approx(20 / 4, rel=0.01)
    assert found.latency_s == pytest.approx(0.5 + 4, rel=0.02)


def test_waa_that_restores_keys_and_values() -> None:
    """Of 20 requests five begin with each step, which is longer by their copies."""
    found = waa_timeline(_sides(prompt_s=1e-4, restore_s=0.04), _waa(20), 0.99).performance
    step_s = 1 + 5 * 0.04
    assert found.requests_per_s == pytest.approx(20 / 4 / step_s, rel=0.02)


def test_waa_whose_sides_are_as_fast_as_each_other() -> None:
    """Either side could serve 1/2 a second. By chance one waits for the other now and then, so that
    less is served, and the more the fewer decode.
    """
    rates = [
        waa_timeline(_sides(), _waa(decoding), 0.99).performance.requests_per_s
        for decoding in (2, 8, 32)
    ]
    assert rates[0] < rates[1] < rates[2] <= 1 / 2


@pytest.mark.parametrize("output", [1, 2, 16, 3000])
@pytest.mark.parametrize("seed", [1, 3])
def test_waa_of_answers_that_are_all_as_long(seed: int, output: int) -> None:
    """Even where only few are left of many, steps take at least what those of one request do."""
    case = random_waa(np.random.default_rng([7, seed]))
    outputs = LengthDistribution((output,), (1.0,))
    sides = replace(case.sides, lengths=replace(case.sides.lengths, outputs=outputs))
    found = waa_timeline(sides, case.schedule, 0.99).performance
    one_s = sides.decode.decode_s(1.0, 1.0) + sides.decode.decode_hop_s(1.0)
    assert 0 < found.requests_per_s <= 1.001 * busy_prefills(sides, case.schedule).requests_per_s
    assert found.latency_s >= (output - 1) * float(one_s.sum())
