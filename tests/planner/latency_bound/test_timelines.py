"""Timelines beside simulations of the same schedules' events, and beside closed forms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from benchmarks.latency_bounds.timelines import of_rra, of_waa
from planner.latency_bound.steady_state.rra import rra_timeline
from planner.latency_bound.steady_state.waa import waa_timeline
from planner.length_distribution import FloatArray, LengthDistribution, RequestLengths
from planner.scheduling import RequestSchedule

ALIKE = RequestLengths(LengthDistribution((10,), (1.0,)), LengthDistribution((5,), (1.0,)))


@dataclass(frozen=True)
class _OneStage:
    """A stage with a prefill of 2 s for each request and decode steps of 1 s."""

    stages: int = 1

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.array([2.0 * requests])

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        return np.array([1.0])

    def prefill_hop_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.zeros(1)

    def decode_hop_s(self, requests: float) -> FloatArray:
        return np.zeros(1)


@pytest.mark.parametrize("seed", range(6))
def test_rra_is_near_its_events(seed: int) -> None:
    found = of_rra(seed, 1500)
    assert abs(found.requests_per_s) < 0.05
    assert abs(found.latency) < 0.15, "of 1,500 requests 15 are above the quantile"


@pytest.mark.parametrize("seed", [1, 2, 5, 6])
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


def test_waa_that_prefills_too_slowly() -> None:
    """Two prefills are under way on the one stage, so that each takes twice its time; then comes
    half of a step until one ends, and four steps.
    """
    schedule = RequestSchedule("waa-c", 1, 100, 1, 1, 1, 10.0)
    found = waa_timeline(_OneStage(), _OneStage(), 0.0, ALIKE, schedule, 0.99)
    assert found.performance.requests_per_s == pytest.approx(1 / 2)
    assert found.performance.latency_s == pytest.approx(4 + 0.5 + 4)


def test_waa_that_decodes_too_slowly() -> None:
    """A request in four steps of one second ends; its prefill waits for nobody."""
    schedule = RequestSchedule("waa-c", 1, 1, 1, 1, 1, 10.0)
    found = waa_timeline(_OneStage(), _OneStage(), 0.1, ALIKE, schedule, 0.99)
    assert found.performance.requests_per_s == pytest.approx(1 / 4)
    assert found.performance.latency_s == pytest.approx(2 + 0.1 * 10 + 0.5 + 4)
