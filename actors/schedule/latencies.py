"""Timing requests from the submission of their prefill to their last token."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from actors.latency_counts import BUCKETS, LatencyCounts, bucket_of
from actors.messages import Admission, Finished

MOST_BEGUN = 2**16
"""Requests whose beginning is kept at most, the latest ones: far more than are in flight."""

UNSEEN = 2**14
"""Latencies that are kept until metrics are published next."""


class LatencyRecord:
    """Counts requests by their latency; other threads may read the counts at any time.

    What a request waits before its prefill is submitted does not count. One that comes back with
    tokens, after a fault or because it was preempted, began when it was prefilled first; where that
    is not known, as it was in a process that died, it is not counted. Nor is one that ends in an
    error.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began_s: dict[str, float] = {}
        self._counts = np.zeros(BUCKETS, dtype=np.int64)
        self._unseen: deque[float] = deque(maxlen=UNSEEN)

    @property
    def counts(self) -> LatencyCounts:
        """The requests that have ended so far."""
        counts = self._counts.copy()
        found = np.flatnonzero(counts)
        return LatencyCounts(tuple(zip(found.tolist(), counts[found].tolist(), strict=True)))

    def begin(self, admitted: Sequence[Admission]) -> None:
        """Note requests whose prefill is about to be submitted."""
        now_s = self._clock()
        for each in admitted:
            if not each.generated:
                self._began_s.pop(each.custom_id, None)  # of another run
                self._began_s[each.custom_id] = now_s
        while len(self._began_s) > MOST_BEGUN:
            del self._began_s[next(iter(self._began_s))]

    def end(self, finished: Sequence[Finished]) -> None:
        """Count requests that have ended."""
        now_s = self._clock()
        for each in finished:
            began_s = self._began_s.pop(each.custom_id, None)
            if began_s is not None and each.finish_reason != "error":
                self._counts[bucket_of(now_s - began_s)] += 1
                self._unseen.append(now_s - began_s)

    def forget(self, custom_id: str) -> None:
        """Leave out a request that was given up."""
        self._began_s.pop(custom_id, None)

    def new_seconds(self) -> list[float]:
        """Return the latency of each request that ended since the last call."""
        return [self._unseen.popleft() for _ in range(len(self._unseen))]
