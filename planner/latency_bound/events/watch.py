"""What is noted of requests in a simulation: when they begin and end, after a warm-up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from planner.latency_bound.events.drawn_requests import DrawnRequest
from planner.length_distribution import FloatArray


@dataclass(frozen=True, eq=False)
class Observed:
    """What was seen after a warm-up: `latencies_s` of requests, and how many came a second, which
    in the steady state is how many ended.
    """

    requests_per_s: float
    latencies_s: FloatArray

    @property
    def mean_latency_s(self) -> float:
        """Mean latency of a request."""
        return float(self.latencies_s.mean())

    def latency_s(self, quantile: float) -> float:
        """The latency that such a share of all requests does not exceed."""
        return float(np.quantile(self.latencies_s, quantile))


class Watch:
    """Notes the requests that begin after `warm_up` others, until at least `counted` of them have
    begun and all of those have ended.

    The time in which they begin is bounded by turns of the same group, as others come at other
    moments of a cycle.
    """

    def __init__(self, warm_up: int, counted: int) -> None:
        self._warm_up, self._counted = warm_up, counted
        self._begun = self._noted = self._pending = 0
        self._from_s: float | None = None
        self._to_s: float | None = None
        self._latencies_s: list[float] = []

    @property
    def requests(self) -> int:
        """The fewest that have to begin."""
        return self._warm_up + self._counted

    @property
    def done(self) -> bool:
        """Whether all that are to be noted have ended."""
        return self._to_s is not None and not self._pending

    def begin(self, requests: Iterable[DrawnRequest], now_s: float, bounds: bool) -> None:
        """Note a turn of requests that begin now; `bounds`: of the group that bounds the time."""
        if bounds and self._from_s is None and self._begun >= self._warm_up:
            self._from_s = now_s
        if bounds and self._to_s is None and self._noted >= self._counted:
            self._to_s = now_s
        for request in requests:
            self._begun += 1
            request.began_s = now_s
            request.noted = self._from_s is not None and self._to_s is None
            self._noted += request.noted
            self._pending += request.noted

    def end(self, requests: Iterable[DrawnRequest], now_s: float) -> None:
        """Note that these have their last token."""
        for request in requests:
            if request.noted:
                self._pending -= 1
                self._latencies_s.append(now_s - request.began_s)

    def observed(self) -> Observed:
        """What was noted."""
        assert self._from_s is not None
        assert self._to_s is not None
        return Observed(self._noted / (self._to_s - self._from_s), np.array(self._latencies_s))
