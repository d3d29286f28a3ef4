"""Seconds of decode rounds, in which every group that has requests makes a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np

from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.steady_state.grid_times import decodes_s
from planner.latency_bound.steady_state.rra.phases import Phases
from planner.latency_bound.steady_state.tandem import PassTimes
from planner.length_distribution import FloatArray

_TIMED_ROUNDS = 16
"""Rounds of a phase that are timed; requests end one after the other, so that time changes little
and steadily between them."""

_SURE = 1e-9
"""A chance of less is none."""


@dataclass(frozen=True, eq=False)
class DecodeRounds:
    """The rounds of a phase on the stages of `times`, of `groups` groups with prompts of so many
    `prompt_tokens` in the mean.
    """

    times: StageTimes
    phases: Phases
    groups: int
    prompt_tokens: float

    def step(self, place: int) -> PassTimes:
        """A decode step of a group in round number `place` after its turn, from 0."""
        context = self.prompt_tokens + float(self.phases.answer_tokens[place])
        return self._step(float(self.phases.requests[place]), context)

    def step_at_turns(self) -> PassTimes:
        """A decode step of a group that has no newcomers, in the round of turns."""
        context = self.prompt_tokens + float(self.phases.answer_tokens[-1])
        return self._step(max(1.0, self.phases.sizes.mean), context)

    def seconds(self) -> tuple[FloatArray, FloatArray]:
        """Mean seconds of each round [decode_steps], 0 where no group has requests; and the same
        for one of the groups that has.
        """
        reached = self.phases.reached
        last = max(0, int(np.count_nonzero(reached > 1e-12)) - 1)
        timed = np.unique(np.linspace(0, last, min(last + 1, _TIMED_ROUNDS)).round().astype(int))
        contexts = self.prompt_tokens + self.phases.answer_tokens[timed]
        compute_s, hop_s = decodes_s(self.times, self.phases.requests[timed], contexts)
        places = np.arange(len(reached))
        longest_s = np.maximum(compute_s, hop_s).max(axis=1)
        busiest_s = np.interp(places, timed, longest_s)
        alone_s = np.interp(places, timed, (compute_s + hop_s).sum(axis=1))
        return (
            _expected_s(self.groups, reached, busiest_s, alone_s, 0),
            _expected_s(self.groups - 1, reached, busiest_s, alone_s, 1),
        )

    def _step(self, requests: float, context: float) -> PassTimes:
        compute_s, hop_s = self.times.decode_s(requests, context), self.times.decode_hop_s(requests)
        return PassTimes.of(compute_s, hop_s)


def _expected_s(
    groups: int, reached: FloatArray, busiest_s: FloatArray, alone_s: FloatArray, surely: int
) -> FloatArray:
    """Mean seconds of rounds in which each of `groups` groups has requests with chance `reached`,
    and `surely` more have.
    """
    all_of_them = groups + surely
    expected_s = np.maximum(all_of_them * busiest_s, alone_s) if all_of_them else 0 * alone_s
    some = np.flatnonzero(reached < 1 - _SURE)
    if len(some):
        count = np.arange(groups + 1)[None, :]
        chance = np.clip(reached[some], 0.0, 1.0)[:, None]
        chances = _ways(groups) * chance**count * (1 - chance) ** (groups - count)
        active = count + surely
        each_s = np.maximum(active * busiest_s[some, None], alone_s[some, None])
        expected_s[some] = (chances * np.where(active, each_s, 0.0)).sum(axis=1)
    return np.asarray(expected_s)


@lru_cache(maxsize=256)
def _ways(groups: int) -> FloatArray:
    """Ways to choose 0, 1, … of so many groups [groups + 1]."""
    return np.array([float(comb(groups, count)) for count in range(groups + 1)])
