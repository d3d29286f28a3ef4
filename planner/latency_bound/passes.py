"""Passes through a pipeline, first come, first served: when each comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from planner.latency_bound.drawn_requests import DrawnRequest
from planner.latency_bound.stage_times import StageTimes
from planner.length_distribution import FloatArray
from planner.simulation.simulation import near_length

Seconds = tuple[list[float], list[float]]
"""Seconds on each stage and on the link behind it."""


class PipelineOfPasses:
    """Stages and links that serve one pass after the other, in the order in which they come."""

    def __init__(self, times: StageTimes) -> None:
        self._times = times
        self._stage_free_s = [0.0] * times.stages
        self._link_free_s = [0.0] * times.stages
        self._steps: dict[tuple[int, int], Seconds] = {}
        self._prompts: dict[tuple[int, int], FloatArray] = {}

    def decode(self, requests: int, context_tokens: int, at_s: float) -> float:
        """When a decode step that is submitted at `at_s` is back; the tokens before it are those of
        all requests.
        """
        key = requests, near_length(round(context_tokens / requests))
        if key not in self._steps:
            hop_s = self._times.decode_hop_s(requests)
            self._steps[key] = self._times.decode_s(*key).tolist(), hop_s.tolist()
        return self._pass(self._steps[key], at_s)

    def prefill(self, prompts: Sequence[int], at_s: float) -> float:
        """When a micro-batch of these prompts that is submitted at `at_s` is back."""
        size, tokens = len(prompts), sum(prompts)
        compute_s = np.zeros(self._times.stages)
        for length, count in Counter(near_length(prompt) for prompt in prompts).items():
            compute_s += count * self._prompt_s(size, length)
        hop_s = self._times.prefill_hop_s(size, tokens / size)
        return self._pass(((compute_s / size).tolist(), hop_s.tolist()), at_s)

    def _prompt_s(self, size: int, length: int) -> FloatArray:
        if (size, length) not in self._prompts:
            self._prompts[size, length] = self._times.prefill_s(size, length)
        return self._prompts[size, length]

    def _pass(self, seconds: Seconds, at_s: float) -> float:
        stage_free_s, link_free_s = self._stage_free_s, self._link_free_s
        for j, (compute_s, hop_s) in enumerate(zip(*seconds, strict=True)):
            free_s = stage_free_s[j]
            stage_free_s[j] = at_s = (free_s if free_s > at_s else at_s) + compute_s
            free_s = link_free_s[j]
            link_free_s[j] = at_s = (free_s if free_s > at_s else at_s) + hop_s
        return at_s


def evenly_divided(requests: Sequence[DrawnRequest], most: int) -> list[Sequence[DrawnRequest]]:
    """Micro-batches of at most `most` requests, in nearly equal numbers."""
    parts = -(-len(requests) // most)
    ends = [len(requests) * (part + 1) // parts for part in range(parts)]
    return [requests[start:end] for start, end in pairwise((0, *ends))]
