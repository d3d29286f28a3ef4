"""Groups in the steady state: who is left at which round of a phase of decoding.

A phase has a round of turns, in which groups with newcomers have them prefilled and the others make
a decode step, and `decode_steps` rounds in which all of them make one. So a group makes one step
more in a phase without newcomers, which counts where turns are small and frequent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.latency_bound.steady_state.completions import Completions
from planner.latency_bound.steady_state.rra.group_sizes import GroupSizes
from planner.length_distribution import FloatArray, LengthDistribution
from planner.scheduling import RequestSchedule

_ROUNDS_TO_SETTLE, _SETTLED = 4, 1e-4


@dataclass(frozen=True, eq=False)
class Phases:
    """`sizes` of groups after their turns, and of each round after it [decode_steps]: the chance
    `reached` that a group still has requests, and then how many in the mean (`requests`), with
    `answer_tokens` each before the one that is fed.
    """

    sizes: GroupSizes
    reached: FloatArray
    requests: FloatArray
    answer_tokens: FloatArray

    @classmethod
    def of(cls, schedule: RequestSchedule, outputs: LengthDistribution) -> Phases:
        """The phases of groups that follow `schedule`."""
        steps = schedule.decode_steps
        short, long = (_completions(outputs, count) for count in (steps, steps + 1))
        more = 0.0  # share of phases with a step more
        for _ in range(_ROUNDS_TO_SETTLE):
            ended = (1 - more) / short.phases + more / long.phases
            sizes = GroupSizes.of(schedule, min(1.0, ended))
            before, more = more, sizes.none_come
            if abs(more - before) < _SETTLED:
                break
        left = (1 - more) * short.decoding / short.phases
        left += more * long.decoding[1:] / long.phases
        reached = 1 - sizes.all_ended(1 - left)
        requests = np.divide(sizes.mean * left, reached, out=np.ones(steps), where=reached > 0)
        tokens = (1 - more) * short.answer_tokens + more * long.answer_tokens[1:]
        return cls(sizes, reached, np.maximum(requests, 1.0), tokens)


@lru_cache(maxsize=1024)
def _completions(outputs: LengthDistribution, decode_steps: int) -> Completions:
    return Completions(outputs, decode_steps)
