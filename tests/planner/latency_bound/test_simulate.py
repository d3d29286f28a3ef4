"""Simulated events of RRA are the runtime's passes, each with the seconds of its own prompts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from actors.schedule.driver import PipelineDriver
from actors.schedule.exegpt import RraScheduler
from planner.latency_bound.simulate import (
    PipelineOfRequests,
    RequestWatch,
    drawn_requests,
    simulate_rra,
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
