"""The order of passes of a job under the policy `s3` (S3, section 3): that of `orca`, but requests
reserve what is predicted of them, and of a pool the longest that fits joins first.

The first stage's actor runs it (`actors.schedule.s3`). Requests that outgrow their reservation are
found by the number of the step at which that happens, so cohorts are counted as those of `orca`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.assumed_predictor import first_reservation
from planner.schedule.orca import Cohort, OrcaSchedule
from planner.schedule.policy_sizes import OrcaSizes, Sizes
from planner.schedule.static import JobRows
from planner.scheduling import PREDICTING

POOL_PER_SLOT = 4
"""Requests that wait in the pool, for each slot, as in `actors.schedule.s3`."""

OVERTAKES_PER_SLOT = 4
"""How often a request is overtaken at most, for each slot, as in `actors.schedule.s3`."""

_TAKEN = -(2**60)
"""The overtakes of a request that does not wait: however many are added, it is not held for."""


def most_waiting(sizes: Sizes, stages: int) -> int:
    """How many requests the pool of a policy with these sizes holds; 0 without one."""
    if not isinstance(sizes, OrcaSizes) or sizes.policy != PREDICTING:
        return 0
    return POOL_PER_SLOT * stages * sizes.max_batch_size


class _Decoding(NamedTuple):
    """A request that decodes: the number of its first step, and the tokens before that."""

    step: int
    text: int


class Pool:
    """The requests [rows] that wait, by their number, longest reservation first.

    Among equal ones those that came first go first. Whoever is urgent, or was overtaken by later
    ones `most` times, is next, whether it fits or not.
    """

    def __init__(self, rows: int, most: int) -> None:
        self._most = most
        self._by_size: list[tuple[int, int]] = []  # sorted pairs of -size and number
        self._overtaken = np.full(rows, _TAKEN, dtype=np.int64)
        self.holds_for: int | None = None
        """The request that is next, whether it fits or not."""
        self._first = self._end = 0  # all that wait are from the one to before the other

    def __len__(self) -> int:
        """The number of requests that wait."""
        return len(self._by_size)

    def add(self, request: int, size: int, is_urgent: bool = False) -> None:
        """Put in a request that reserves `size` token slots."""
        insort(self._by_size, (-size, request))
        self._overtaken[request] = self._most if is_urgent else 0
        self._first, self._end = min(self._first, request), max(self._end, request + 1)
        if is_urgent:
            self.holds_for = min(request, self.holds_for if self.holds_for is not None else request)

    def next(self, free: int, sizes: Sequence[int]) -> int | None:
        """The next request for `free` token slots, where it fits; `sizes` of all [rows]."""
        if self.holds_for is not None:
            return self.holds_for if sizes[self.holds_for] <= free else None
        place = bisect_left(self._by_size, (-free, -1))
        return self._by_size[place][1] if place < len(self._by_size) else None

    def take(self, request: int, size: int) -> None:
        """Take out a request; those that came before it are overtaken."""
        del self._by_size[bisect_left(self._by_size, (-size, request))]
        self._overtaken[request] = _TAKEN
        while self._first < self._end and self._overtaken[self._first] < 0:
            self._first += 1
        self._overtaken[self._first : request] += 1
        held = self._overtaken[self._first : self._end] >= self._most
        self.holds_for = self._first + int(held.argmax()) if held.any() else None


class S3Schedule(OrcaSchedule):
    """The decisions of `actors.schedule.s3` for a queue of `rows`, of which the pool is filled up
    before each pass. Keys and values of preempted requests are computed again.

    Raises as `OrcaSchedule`.
    """

    def __init__(self, rows: JobRows, sizes: OrcaSizes, stages: int) -> None:
        super().__init__(rows, sizes, stages)
        self._most = self._reserved
        prompts, most = np.array(self._texts), np.array(self._most)
        expected = most - prompts if rows.expected is None else np.maximum(1, rows.expected)
        self._reserved = first_reservation(prompts, expected, most).tolist()
        self._chunk = sizes.prefill_chunk_tokens or sizes.max_batch_tokens
        self._pool_size = most_waiting(sizes, stages)
        overtakes = OVERTAKES_PER_SLOT * stages * sizes.max_batch_size
        self._pool = Pool(len(self._reserved), overtakes)
        self._queued = 0
        self._decoding: dict[int, _Decoding] = {}
        self._again: set[int] = set()
        self.grown = self.preempted = self.recomputed_tokens = 0

    def _select(self, cohort: Cohort) -> list[tuple[int, int]]:
        """Give room to those that have outgrown theirs, then let newcomers join."""
        while self._queued < len(self._reserved) and len(self._pool) < self._pool_size:
            self._pool.add(self._queued, self._reserved[self._queued])
            self._queued += 1
        short = cohort.outgrows.pop(cohort.step, None)
        if short is not None:
            self._supervise(cohort, sorted(short))
        cohort.prompts.sort(key=lambda each: each.request)
        return super()._select(cohort)

    def _supervise(self, cohort: Cohort, short: list[int]) -> None:
        """Double the reservations of requests, or preempt those for which there is no room."""
        while short:
            left: list[int] = []
            for request in short:
                size = self._doubled(request)
                more = size - self._reserved[request]
                if more > self._available:
                    left.append(request)
                    continue
                self._n_rsrv += more
                self._reserved[request] = size
                self.grown += 1
                self._note_outgrowing(cohort, request)
            if left:
                self._preempt(cohort, left.pop())
            short = left

    def _doubled(self, request: int) -> int:
        return min(2 * self._reserved[request], self._most[request])

    def _preempt(self, cohort: Cohort, request: int) -> None:
        """Put a request that decodes back into the pool, to be prefilled with all of its tokens."""
        began = self._decoding.pop(request)
        steps = cohort.step - began.step
        context = began.text + steps
        cohort.decoding -= 1
        cohort.context_tokens -= context
        last = began.step + self._outputs[request] - 1
        cohort.ends[last].remove((request, began.text + self._outputs[request] - 1))
        self._texts[request] = context + 1
        self._outputs[request] -= steps + 1
        self._n_rsrv -= self._reserved[request]
        self._running -= 1
        self.preempted += 1
        self.recomputed_tokens += context
        self._reserved[request] = self._doubled(request)
        self._again.add(request)
        self._pool.add(request, self._reserved[request], is_urgent=True)

    def _next(self) -> int | None:
        return self._pool.next(self._available, self._reserved)

    def _take(self, request: int) -> None:
        self._pool.take(request, self._reserved[request])
        self._n_rsrv += self._reserved[request]
        if request not in self._again:
            self._next_request += 1

    def _decode(self, cohort: Cohort, request: int, text: int, steps: int) -> None:
        super()._decode(cohort, request, text, steps)
        self._decoding[request] = _Decoding(cohort.step, text)
        self._note_outgrowing(cohort, request)

    def _note_outgrowing(self, cohort: Cohort, request: int) -> None:
        """Note the step for whose token the reservation has no room, if the request gets there."""
        began, size = self._decoding[request], self._reserved[request]
        step = began.step + size - began.text
        if step < began.step + self._outputs[request] - 1:
            cohort.outgrows.setdefault(step, []).append(request)

    def _leave(self, request: int) -> None:
        super()._leave(request)
        self._decoding.pop(request, None)
