"""Groups in the steady state: who is left at which step of a phase of decoding.

A phase begins with a turn, after which a group makes `decode_steps` steps, or as many as some of
its requests want. One that had no newcomers comes to its next turn earlier than others by a pass,
and makes a step more as it waits for these (`planner.schedule.turns`), which counts where turns are
small and frequent.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from planner.latency_bound.steady_state.completions import Completions
from planner.latency_bound.steady_state.rra.group_sizes import GroupSizes
from planner.length_distribution import FloatArray, LengthDistribution, RequestLengths
from planner.schedule.turns import Turns
from planner.scheduling import RequestSchedule

_ROUNDS_TO_SETTLE, _SETTLED = 4, 1e-4
_NEVER, _RARE = 1 << 30, 1e-12


@dataclass(frozen=True, eq=False)
class Phases:
    """`sizes` of groups after their turns, and of each step after it [decode_steps]: the chance
    `reached` that a group still has requests, and then how many in the mean (`requests`), with
    `answer_tokens` each before the one that is fed. Phases without newcomers have `waits` more.
    """

    sizes: GroupSizes
    reached: FloatArray
    requests: FloatArray
    answer_tokens: FloatArray
    waits: int

    @classmethod
    def of(cls, schedule: RequestSchedule, lengths: RequestLengths) -> Phases:
        """The phases of groups that follow `schedule`."""
        steps, waits = schedule.decode_steps, int(Turns.of(schedule).is_near((1,)))
        short, long = (_completions(lengths.outputs, count) for count in (steps, steps + 1))
        more = 0.0  # share of phases with a step more
        for _ in range(_ROUNDS_TO_SETTLE):
            ended = (1 - more) / short.phases + more / long.phases
            sizes = GroupSizes.of(schedule, lengths.prompts, min(1.0, ended))
            before, more = more, waits * sizes.none_come
            if abs(more - before) < _SETTLED:
                break
        left = (1 - more) * short.decoding / short.phases
        left += more * long.decoding[:-1] / long.phases
        reached = 1 - sizes.all_ended(1 - left)
        requests = np.divide(sizes.mean * left, reached, out=np.ones(steps), where=reached > 0)
        tokens = (1 - more) * short.answer_tokens + more * long.answer_tokens[:-1]
        return cls(sizes, reached, np.maximum(requests, 1.0), tokens, waits)

    @property
    def none_come_later(self) -> float:
        """The chance of no newcomers at a later turn of a request's group."""
        return float(self.sizes.none_come / max(1 - self.sizes.empty, _RARE))

    def empty_after(self, share: float) -> int:
        """The steps after which a group is empty, of groups of which such a share are so later."""
        if share < 1 - self.sizes.empty:
            return _NEVER
        return len(self.reached) - bisect_right(self._reached_upwards, share)

    @cached_property
    def _reached_upwards(self) -> list[float]:
        found: list[float] = self.reached[::-1].tolist()
        return found


@lru_cache(maxsize=1024)
def _completions(outputs: LengthDistribution, decode_steps: int) -> Completions:
    return Completions(outputs, decode_steps)
