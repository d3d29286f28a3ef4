"""Stages and links that serve passes first come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from planner.length_distribution import FloatArray
from planner.schedule.static import UNDER_WAY_PER_STAGE


@dataclass(frozen=True, slots=True, eq=False)
class PassTimes:
    """Seconds of a pass on each stage, and on the link behind it [N]."""

    compute_s: Sequence[float]
    hop_s: Sequence[float]

    @classmethod
    def of(cls, compute_s: FloatArray, hop_s: FloatArray) -> PassTimes:
        """The same as lists, with which sums of few are quicker."""
        return cls(compute_s.tolist(), hop_s.tolist())

    @property
    def alone_s(self) -> float:
        """Seconds of a pass that waits nowhere."""
        return sum(self.compute_s) + sum(self.hop_s)

    @property
    def busiest_s(self) -> float:
        """Seconds of the slowest stage or link."""
        return max(*self.compute_s, *self.hop_s)


class Tandem:
    """A pipeline of `stages` stages, of which at most so many passes are under way at a time as the
    runtime allows.
    """

    def __init__(self, stages: int) -> None:
        self._stage_free_s = [0.0] * stages
        self._link_free_s = [0.0] * stages
        most = UNDER_WAY_PER_STAGE * stages
        self._backs_s = deque([0.0] * most, most)

    def run(self, times: PassTimes, ready_s: float) -> float:
        """Run a pass that is ready then; returns when it is back."""
        at_s = max(ready_s, self._backs_s[0])
        stage_free_s, link_free_s = self._stage_free_s, self._link_free_s
        hops = zip(times.compute_s, times.hop_s, strict=True)
        for j, (compute_s, hop_s) in enumerate(hops):
            free_s = stage_free_s[j]
            stage_free_s[j] = at_s = (free_s if free_s > at_s else at_s) + compute_s
            free_s = link_free_s[j]
            link_free_s[j] = at_s = (free_s if free_s > at_s else at_s) + hop_s
        self._backs_s.append(at_s)
        return at_s

    @property
    def open_s(self) -> float:
        """When the next pass may be under way."""
        return self._backs_s[0]
