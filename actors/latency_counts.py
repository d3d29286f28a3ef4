"""Counts of requests by latency, small enough to be sent every second and kept in journals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

PER_OCTAVE = 64
"""Buckets between a latency and twice that: a bucket is 1.1 % wide, and so is what a quantile may
be above the true one."""

LEAST_S, MOST_S = 2.0**-10, 2.0**18
"""Latencies that are told apart: those beyond count as these."""

BUCKETS = round(PER_OCTAVE * math.log2(MOST_S / LEAST_S)) + 1


def bucket_of(seconds: float) -> int:
    """The number of the bucket that a latency is in, from 0."""
    kept = min(max(seconds, LEAST_S), MOST_S)
    return math.ceil(PER_OCTAVE * math.log2(kept / LEAST_S))


def upper_s(bucket: int) -> float:
    """The longest latency of a bucket, in seconds."""
    return float(LEAST_S * 2 ** (bucket / PER_OCTAVE))


@dataclass(frozen=True)
class LatencyCounts:
    """How many requests took how long: `buckets` are pairs of a bucket's number, ascending, and a
    count above 0.
    """

    buckets: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, seconds: Iterable[float]) -> LatencyCounts:
        return cls(tuple(sorted(Counter(map(bucket_of, seconds)).items())))

    @property
    def requests(self) -> int:
        return sum(count for _, count in self.buckets)

    def plus(self, other: LatencyCounts) -> LatencyCounts:
        both = Counter(dict(self.buckets)) + Counter(dict(other.buckets))
        return LatencyCounts(tuple(sorted(both.items())))

    def since(self, earlier: LatencyCounts) -> LatencyCounts:
        """The requests that came after `earlier`."""
        left = Counter(dict(self.buckets)) - Counter(dict(earlier.buckets))
        return LatencyCounts(tuple(sorted(left.items())))

    def quantile_s(self, share: float) -> float | None:
        """The seconds that this share of all requests takes at most, up to the width of a bucket
        more; None where there is none.
        """
        wanted, reached = share * self.requests, 0
        for bucket, count in self.buckets:
            reached += count
            if reached >= wanted:
                return upper_s(bucket)
        return None


NO_LATENCIES = LatencyCounts()
