"""Seconds of decode rounds, in which every group that has requests makes a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.steady_state.phases import Phases
from planner.latency_bound.steady_state.tandem import PassTimes
from planner.length_distribution import FloatArray

_TIMED_ROUNDS = 16
"""Rounds of a phase that are timed; requests end one after the other, so that time changes little
and steadily between them."""


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
        steps = [self.step(int(place)) for place in timed]
        places = np.arange(len(reached))
        busiest_s = np.interp(places, timed, [each.busiest_s for each in steps])
        alone_s = np.interp(places, timed, [each.alone_s for each in steps])
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
    from scipy.special import gammaln  # takes a tenth of a second, which commands do not wait for

    count = np.arange(groups + 1)[None, :]
    chance = np.clip(reached, 0.0, 1.0)[:, None]
    ways = np.exp(gammaln(groups + 1) - gammaln(count + 1) - gammaln(groups - count + 1))
    chances = ways * chance**count * (1 - chance) ** (groups - count)
    active = count + surely
    seconds = np.where(active, np.maximum(active * busiest_s[:, None], alone_s[:, None]), 0.0)
    return np.asarray((chances * seconds).sum(axis=1))
