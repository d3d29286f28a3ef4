"""The requests that wait for a reservation under the policy `s3`: the longest that fits, unless one
has waited too long.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.messages import Request


@dataclass(frozen=True, eq=False)
class Waiting:
    """A request, the number of its arrival, and the token slots that it reserves.

    `parked`: how many of its tokens lie in host memory, where it was preempted. `is_urgent`: it
    goes before all that are not, as if it were overtaken too often.
    """

    request: Request
    arrival: int
    size: int
    parked: int = 0
    is_urgent: bool = False


class RequestPool:
    """Requests by the size of their reservation, the longest first, and among equal ones those that
    came first (decreasing first fit, S3 section 3).

    Whoever was overtaken `most_overtakes` times or is urgent is next, whether it fits or not; of
    several, the one that came first. Then nobody is overtaken more often: when one is taken that
    came later, none that came before it has been overtaken that often, or it would be next itself.

    Taking one of thousands takes microseconds: sizes are looked up by bisection, and overtakes are
    counted in an array.
    """

    def __init__(self, most_overtakes: int) -> None:
        self._most_overtakes = most_overtakes
        self._waiting: dict[int, Waiting] = {}  # by arrival
        self._by_size: list[tuple[int, int]] = []  # sorted pairs of -size and arrival
        self._arrivals = np.zeros(0, dtype=np.int64)  # sorted
        self._overtaken = np.zeros(0, dtype=np.int64)  # of each of these

    def __len__(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting)

    def add(self, newcomers: Sequence[Waiting]) -> None:
        """Put in requests, those that were preempted too."""
        if len(newcomers) == 1:
            insort(self._by_size, _key(newcomers[0]))
        else:
            self._by_size += map(_key, newcomers)
            self._by_size.sort()
        self._waiting |= {each.arrival: each for each in newcomers}
        arrivals = np.array([each.arrival for each in newcomers], dtype=np.int64)
        places = np.searchsorted(self._arrivals, arrivals)
        self._arrivals = np.insert(self._arrivals, places, arrivals)
        most = self._most_overtakes
        overtaken = [most if each.is_urgent else 0 for each in newcomers]
        self._overtaken = np.insert(self._overtaken, places, overtaken)

    def next(self, free: int) -> Waiting | None:
        """Find the next request for `free` token slots; None where it does not fit, or none does.

        What does not fit now does not fit after another was taken: so asking again is going on
        through the pool.
        """
        held = np.flatnonzero(self._overtaken >= self._most_overtakes)
        if len(held):
            first = self._waiting[int(self._arrivals[held[0]])]
            return first if first.size <= free else None
        place = bisect_left(self._by_size, (-free, -1))
        return self._waiting[self._by_size[place][1]] if place < len(self._by_size) else None

    def take(self, waiting: Waiting) -> None:
        """Take out a request that is admitted; those that came before it are overtaken."""
        self._overtaken[: np.searchsorted(self._arrivals, waiting.arrival)] += 1
        self._remove(waiting)

    def give_up(self, custom_id: str) -> list[Waiting]:
        """Take out what waits by this id."""
        found = [each for each in self._waiting.values() if each.request.custom_id == custom_id]
        for each in found:
            self._remove(each)
        return found

    def _remove(self, waiting: Waiting) -> None:
        del self._waiting[waiting.arrival]
        del self._by_size[bisect_left(self._by_size, _key(waiting))]
        place = np.searchsorted(self._arrivals, waiting.arrival)
        self._arrivals = np.delete(self._arrivals, place)
        self._overtaken = np.delete(self._overtaken, place)


def _key(waiting: Waiting) -> tuple[int, int]:
    return -waiting.size, waiting.arrival
