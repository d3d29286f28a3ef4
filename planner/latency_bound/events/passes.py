"""Passes of single requests through a pipeline, in a simulation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.costs.unlike_prompts import near_length, unlike_prompts_s
from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.steady_state.tandem import PassTimes, Tandem
from planner.latency_bound.steady_state.waa.handover import StageCopies
from planner.length_distribution import FloatArray


class PipelineOfRequests:
    """A pipeline with these times. Stages copy keys and values of some prompts by `copies` (None:
    of none), and compute nothing meanwhile.
    """

    def __init__(self, times: StageTimes, copies: StageCopies | None = None) -> None:
        self._times, self._copies = times, copies
        self.stages = times.stages
        self._tandem = Tandem(times.stages)
        self._steps: dict[tuple[int, int], PassTimes] = {}
        self._prompts: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}

    def decode(
        self, requests: int, context_tokens: int, at_s: float, copied: Sequence[int] = ()
    ) -> float:
        """When a decode step that is submitted at `at_s` is back; the tokens before it are those of
        all requests, and the prompts of some, of so many tokens, are `copied`.
        """
        size, context = requests, near_length(round(context_tokens / requests))
        if (size, context) not in self._steps:
            compute_s, hop_s = self._times.decode_s(size, context), self._times.decode_hop_s(size)
            self._steps[size, context] = PassTimes.of(compute_s, hop_s)
        step = self._steps[size, context]
        if copied:
            step = PassTimes.of(step.compute_s + self._copies_s(copied), np.array(step.hop_s))
        return self._tandem.run(step, at_s)

    def prefill(self, prompts: Sequence[int], at_s: float, copied: Sequence[int] = ()) -> float:
        """When a micro-batch of these prompts that is submitted at `at_s` is back; some of them are
        `copied`.
        """
        size, tokens = len(prompts), sum(prompts)
        compute_s = unlike_prompts_s(prompts, self._parts) + self._copies_s(copied)
        hop_s = self._times.prefill_hop_s(size, tokens / size)
        return self._tandem.run(PassTimes.of(compute_s, hop_s), at_s)

    def _parts(self, requests: int, length: int) -> tuple[FloatArray, FloatArray]:
        """Seconds of attention and of the rest [N] for prompts that are all so long."""
        key = requests, length
        if key not in self._prompts:
            attention_s = self._times.attention_s(*key)
            self._prompts[key] = attention_s, self._times.prefill_s(*key) - attention_s
        return self._prompts[key]

    def _copies_s(self, prompts: Sequence[int]) -> FloatArray:
        """Seconds in which stages copy keys and values of prompts of so many tokens [N]."""
        if self._copies is None or not prompts:
            return np.zeros(self._times.stages)
        return self._copies.seconds(len(prompts), sum(prompts))
