"""Seconds of decode rounds, in which every group makes a step."""

from __future__ import annotations

import numpy as np

from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.steady_state.grid_times import decodes_s
from planner.latency_bound.steady_state.rra.phases import Phases
from planner.latency_bound.steady_state.tandem import PassTimes
from planner.length_distribution import FloatArray

_SURE = 1e-12
"""A chance of less is none."""
_TIMED_ROUNDS = 16
"""Rounds of a phase that are timed, beside the first ones; requests end one after the other, so
that time changes little and steadily between them."""
FIRST_ROUNDS = 3


class DecodeRounds:
    """The rounds of a phase on the stages of `times`, of `groups` groups with prompts of so many
    `prompt_tokens` in the mean.
    """

    def __init__(
        self, times: StageTimes, phases: Phases, groups: int, prompt_tokens: float
    ) -> None:
        self.stages, self.phases, self.groups = times.stages, phases, groups
        last = max(0, int(np.count_nonzero(phases.reached > _SURE)) - 1)
        spread = np.linspace(0, last, min(last + 1, _TIMED_ROUNDS)).round().astype(int)
        first = np.arange(min(last + 1, FIRST_ROUNDS))
        self._timed = np.union1d(first, spread)
        contexts = prompt_tokens + phases.answer_tokens[self._timed]
        self._seconds = decodes_s(times, phases.requests[self._timed], contexts)
        self._steps: dict[int, PassTimes] = {}

    def step(self, place: int) -> PassTimes:
        """A decode step of a group about so many steps after its turn, from 0."""
        row = min(int(np.searchsorted(self._timed, place)), len(self._timed) - 1)
        if row not in self._steps:
            self._steps[row] = PassTimes.of(*(each[row] for each in self._seconds))
        return self._steps[row]

    def seconds(self) -> FloatArray:
        """Mean seconds of each round beside no turn [decode_steps]."""
        compute_s, hop_s = self._seconds
        busiest_s = np.maximum(compute_s, hop_s).max(axis=1)
        alone_s = (compute_s + hop_s).sum(axis=1)
        each_s = np.maximum(self.groups * busiest_s, alone_s)
        return np.asarray(np.interp(np.arange(len(self.phases.reached)), self._timed, each_s))
