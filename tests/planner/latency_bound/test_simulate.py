"""Simulated events of RRA are the runtime's passes, each with the seconds of its own prompts; those
of WAA, with lengths all alike, take the seconds computed by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from actors.schedule.driver import PipelineDriver
from actors.schedule.exegpt import RraScheduler
from planner.latency_bound.placed_layers import Handover, PipelineOfRequests, StageCopies, WaaSides
from planner.latency_bound.simulate import (
    ObservedRequests,
    RequestWatch,
    drawn_requests,
    simulate_rra,
    simulate_waa,
)
from planner.lengths import FloatArray, LengthDistribution, RequestLengths
from planner.schedule.passes import TurnSizes
from planner.scheduling import RequestSchedule
from tests.actors.driving import run_dry
from tests.actors.schedule.exegpt_cases import queue_sizes_of
from tests.actors.schedule.token_pipeline import TokenPipeline, request

REQUESTS = 60


@dataclass
class NotedStages:
    """Stages whose passes take odd times; they note the passes that are asked for."""

    stages: int
    passes: list[tuple[str, int, int]] = field(default_factory=list)

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.full(self.stages, 0.3 + 0.01 * requests * prompt_tokens)

    def attention_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.zeros(self.stages)

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        return np.full(self.stages, 0.1 + 0.01 * requests)

    def prefill_hop_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        self.passes.append(("prefill", int(requests), round(requests * prompt_tokens)))
        return np.zeros(self.stages)

    def decode_hop_s(self, requests: float) -> FloatArray:
        return np.zeros(self.stages)


def random_lengths(rng: np.random.Generator, longest: int) -> LengthDistribution:
    lengths = sorted(set(rng.integers(1, longest, 4).tolist()))
    return LengthDistribution(tuple(lengths), (1 / len(lengths),) * len(lengths))


@pytest.mark.parametrize("seed", range(6))
def test_events_prefill_what_the_runtime_prefills(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turn for turn, with the requests that the simulation drew, on several stages and groups."""
    rng = np.random.default_rng(seed)
    stages, decode = int(rng.integers(1, 4)), int(rng.integers(1, 20))
    lengths = RequestLengths(random_lengths(rng, 20), random_lengths(rng, 12))
    schedule = RequestSchedule(
        "rra",
        int(rng.integers(1, decode + 1)),
        decode,
        int(rng.integers(1, 9)),
        int(rng.integers(1, 5)),
        int(rng.integers(1, 4)),
        lengths.prompts.mean,
    )
    longest = lengths.prompts.longest + lengths.outputs.longest
    n_slots = longest + int(rng.integers(0, longest * decode))
    noted = NotedStages(stages)
    requests = drawn_requests(lengths, 400, rng)
    monkeypatch.setattr("planner.latency_bound.simulate.drawn_requests", lambda *_: requests)
    observed = simulate_rra(noted, lengths, schedule, RequestWatch(5, REQUESTS), rng, n_slots)
    assert observed.requests_per_s > 0

    outputs = {str(i): each.output for i, each in enumerate(requests)}
    pipeline = TokenPipeline(stages, n_slots, outputs)
    asked = [request(i, each.prompt, lengths.outputs.longest) for i, each in enumerate(requests)]
    pipeline.expect(asked)
    sizes = queue_sizes_of(TurnSizes.of(schedule, n_slots), n_slots)
    driver = PipelineDriver(RraScheduler(sizes, stages), pipeline)
    driver.add(asked)
    for _ in run_dry(driver):
        if sum(batch.kind == "prefill" for batch in pipeline.batches) >= len(noted.passes):
            break
    ran = [
        ("prefill", len(batch.slots), int(batch.counts.sum()))
        for batch in pipeline.batches
        if batch.kind == "prefill"
    ]
    assert len(noted.passes) > 5
    assert noted.passes == ran[: len(noted.passes)]


@pytest.mark.parametrize("seed", range(4))
def test_a_quantile_at_the_end_of_common_answers_is_that_of_these(seed: int) -> None:
    """A tenth of all answers are long, of those that are drawn in a stretch more or fewer."""
    outputs = LengthDistribution((5, 40), (0.9, 0.1))
    lengths = RequestLengths(LengthDistribution((10,), (1.0,)), outputs)
    schedule = RequestSchedule("rra", 2, 3, 4, 1, 2, 10.0)
    rng, watch = np.random.default_rng(seed), RequestWatch(9, 150)
    seen = simulate_rra(NotedStages(1), lengths, schedule, watch, rng)
    is_short = seen.strata == seen.strata.min()
    short = seen.latencies_s[is_short]
    assert seen.latency_s(0.9) == short.max()
    assert seen.latency_s(0.901) > short.max()
    assert seen.mean_latency_s == pytest.approx(
        0.9 * short.mean() + 0.1 * seen.latencies_s[~is_short].mean()
    )


def test_the_error_of_a_quantile_is_about_that_of_other_draws() -> None:
    """And none where all requests take as long."""
    outputs = LengthDistribution(tuple(range(1, 41)), (1 / 40,) * 40)
    lengths = RequestLengths(LengthDistribution((4, 30), (0.5, 0.5)), outputs)
    schedule = RequestSchedule("rra", 3, 15, 5, 1, 3, 17.0)

    def seen(seed: int) -> ObservedRequests:
        rng, watch = np.random.default_rng(seed), RequestWatch(45, 400)
        return simulate_rra(NotedStages(1), lengths, schedule, watch, rng)

    found = [seen(seed) for seed in range(8)]
    apart = 2 * float(np.std([each.latency_s(0.9) for each in found], ddof=1))
    stated = float(np.mean([each.latency_error_s(0.9) for each in found]))
    assert apart / 3 < stated < 3 * apart
    assert _observed(20.0, 0.01, decoding=8).latency_error_s(0.9) == 0


def test_requests_are_drawn_as_often_as_they_come() -> None:
    """In any stretch from the beginning on that has 1024 of them, to one request."""
    outputs = LengthDistribution((1, 2, 9), (0.5, 0.4, 0.1))
    lengths = RequestLengths(LengthDistribution((3, 7), (0.25, 0.75)), outputs)
    drawn = drawn_requests(lengths, 2048, np.random.default_rng(0))
    for part in (drawn[:1024], drawn[1024:]):
        for length, share in zip(outputs.lengths, outputs.probabilities, strict=True):
            assert abs(sum(each.output == length for each in part) - 1024 * share) <= 1
        assert abs(sum(each.prompt == 3 for each in part) - 256) <= 1
    assert [each.output for each in drawn[:1024]] != sorted(each.output for each in drawn[:1024])


@dataclass(frozen=True)
class _TwoStages:
    """Stages with 3 s a pass, a second for 10 tokens, and one for 100 pairs of tokens."""

    stages: int = 2

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return 3 + requests * prompt_tokens / 10 + self.attention_s(requests, prompt_tokens)

    def attention_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.full(2, requests * prompt_tokens**2 / 100)

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        return np.ones(2)

    def prefill_hop_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.full(2, 0.5)

    def decode_hop_s(self, requests: float) -> FloatArray:
        return np.zeros(2)


@pytest.mark.parametrize("prompts", [[7], [20, 20], [4, 30, 11], [50, 1, 1, 1, 50]])
def test_unlike_prompts_share_the_rest_and_attend_alone(prompts: list[int]) -> None:
    """By hand; up to 50 tokens lengths stand for themselves."""
    of_stage_s = 3 + sum(prompts) / 10 + sum(tokens**2 for tokens in prompts) / 100
    ends_s = PipelineOfRequests(_TwoStages()).prefill(prompts, 1.0)
    assert ends_s == pytest.approx(1 + 2 * (of_stage_s + 0.5))


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
