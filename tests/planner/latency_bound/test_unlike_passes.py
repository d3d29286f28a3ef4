"""Passes of requests through a pipeline take the seconds of their own lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from planner.latency_bound.simulate import PipelineOfRequests
from planner.length_distribution import FloatArray


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
