"""Keys and values on their way from stages that prefill to stages that decode (WAA, ExeGPT section
3): what passes take longer by it, and what messages take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.preemption import HostCopies
from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.steady_state.grid_times import ManyTimes, decodes_s, mean_prefill_s
from planner.length_distribution import FloatArray, LengthDistribution, RequestLengths

LEAST_STEPS = 1e-9
"""Decode steps of a request that are counted where all answers have one token."""


@dataclass(frozen=True, eq=False)
class StageCopies:
    """Seconds in which each stage copies keys and values to the memory of its host, or from there
    [N]: of each request, and of each of its tokens.
    """

    request_s: FloatArray
    token_s: FloatArray

    @classmethod
    def of(cls, copies: Sequence[HostCopies]) -> StageCopies:
        """The same of several stages [N]."""
        request_s = np.array([each.one_way_s(0) for each in copies])
        return cls(request_s, np.array([each.one_way_s(1) for each in copies]) - request_s)

    def seconds(self, requests: float, tokens: float) -> FloatArray:
        """Seconds of so many requests with so many tokens together [N]."""
        return requests * self.request_s + tokens * self.token_s


@dataclass(frozen=True, eq=False)
class Handover:
    """Stages that prefill copy keys and values of prompts to their hosts when they have computed
    them (`keep`), and those that decode copy them from theirs before the first step of a request
    (`restore`). Either is done by the stage between its kernels, so that a pass takes longer by it.

    From host to host messages go one after the other: each takes `message_s`, and `token_s` for
    every token of its prompts.
    """

    keep: StageCopies
    restore: StageCopies
    message_s: float
    token_s: float

    def sent_s(self, tokens: float) -> float:
        """Seconds of a message with prompts of so many tokens together."""
        return self.message_s + self.token_s * tokens

    def prefilling(self, times: StageTimes, outputs: LengthDistribution) -> StageTimes:
        """The times of stages that prefill, and keep what others decode with."""
        going = going_on(outputs)
        kept = StageCopies(going * self.keep.request_s, going * self.keep.token_s)
        return _CopyingTimes(times, kept, np.zeros(times.stages))

    def decoding(self, times: StageTimes, lengths: RequestLengths) -> StageTimes:
        """The times of stages that decode, in each of whose steps as many requests begin as end."""
        steps = max(lengths.outputs.mean - 1, LEAST_STEPS)
        restored_s = self.restore.seconds(1.0, lengths.prompts.mean)
        none = StageCopies(np.zeros(times.stages), np.zeros(times.stages))
        return _CopyingTimes(times, none, going_on(lengths.outputs) / steps * restored_s)


def going_on(outputs: LengthDistribution) -> float:
    """The share of requests that make decode steps at all."""
    return 1 - outputs.probabilities[0] if outputs.lengths[0] == 1 else 1.0


class _CopyingTimes(ManyTimes):
    """The `times` of stages that copy so much of each prompt, and for every request of a decode
    step `step_s` seconds [N].
    """

    def __init__(self, times: StageTimes, prompts: StageCopies, step_s: FloatArray) -> None:
        self._times, self._prompts, self._step_s = times, prompts, step_s

    @property
    def stages(self) -> int:
        return self._times.stages

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        copied_s = self._prompts.seconds(requests, requests * prompt_tokens)
        return self._times.prefill_s(requests, prompt_tokens) + copied_s

    def attention_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return self._times.attention_s(requests, prompt_tokens)

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        return self._times.decode_s(requests, context_tokens) + requests * self._step_s

    def prefill_hop_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return self._times.prefill_hop_s(requests, prompt_tokens)

    def decode_hop_s(self, requests: float) -> FloatArray:
        return self._times.decode_hop_s(requests)

    def mean_prefill_s(self, requests: float, prompts: LengthDistribution) -> FloatArray:
        copied_s = self._prompts.seconds(requests, requests * prompts.mean)
        return mean_prefill_s(self._times, requests, prompts) + copied_s

    def decodes_s(
        self, requests: FloatArray, context_tokens: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        compute_s, hop_s = decodes_s(self._times, requests, context_tokens)
        return compute_s + requests[:, None] * self._step_s, hop_s
