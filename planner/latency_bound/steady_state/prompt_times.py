"""Seconds of prefill micro-batches of unlike prompts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.steady_state.grid_times import mean_prefill_s
from planner.latency_bound.steady_state.tandem import PassTimes
from planner.length_distribution import FloatArray, LengthDistribution

_SLOPE_STEP = 0.25


@dataclass(frozen=True, eq=False)
class PromptTimes:
    """Micro-batches of prompts of these lengths on the stages of `times`."""

    times: StageTimes
    prompts: LengthDistribution
    _known: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def part(self, size: int, tokens: float) -> PassTimes:
        """A micro-batch of so many prompts, which have so many tokens together."""
        each = tokens / size
        if size == 1:
            return PassTimes.of(self.times.prefill_s(1, each), self.times.prefill_hop_s(1, each))
        mean_s, per_token_s = self._of_size(size)
        compute_s = np.maximum(mean_s + (each - self.prompts.mean) * per_token_s, mean_s / size)
        return PassTimes.of(compute_s, self.times.prefill_hop_s(size, each))

    def _of_size(self, size: int) -> tuple[FloatArray, FloatArray]:
        """Mean seconds of so many prompts [N], and those of one token more in each of them [N]."""
        if size not in self._known:
            low, high = ((1 + sign * _SLOPE_STEP) * self.prompts.mean for sign in (-1, 1))
            more_s = self.times.prefill_s(size, high) - self.times.prefill_s(size, low)
            mean_s = mean_prefill_s(self.times, size, self.prompts)
            self._known[size] = mean_s, more_s / (high - low)
        return self._known[size]
