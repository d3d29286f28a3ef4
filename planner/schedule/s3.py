"""The policy `s3-published` (S3, section 3): as `orca`, but requests reserve what is predicted of
them, and of a pool the longest that fits joins first. Those that outgrow their reservation are
found by step, so that cohorts are counted as those of `orca`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from planner.schedule.orca import Cohort, OrcaPolicy, OrcaSchedule, Waiting
from planner.schedule.passes import JobRows, OrcaSizes, Sizes
from planner.scheduling import PREDICTING

POOL_PER_SLOT = 4
"""Requests in the pool for each slot before a run begins to draw from a queue: so many that one of
them fits nearly always, and small beside the keys and values of as many."""

OVERTAKES_PER_SLOT = 4
"""How often a request is overtaken at most, for each slot: all slots are taken anew that often
while it waits. The fewer, the more often memory is held empty for those who wait."""

_TAKEN = -(2**60)
"""The overtakes of a request that does not wait: however many are added, it is not held for."""


def most_waiting(sizes: Sizes, stages: int) -> int:
    """How many requests the pool of a policy with these sizes holds; 0 without one."""
    if not isinstance(sizes, OrcaSizes) or sizes.policy not in PREDICTING:
        return 0
    return POOL_PER_SLOT * stages * sizes.max_batch_size


def first_reservation_of(prompt: int, most: int, expected: int | None, generated: int = 0) -> int:
    """Token slots to reserve first: prompt and expected tokens, but more than `generated`."""
    likely = most - prompt if expected is None else expected
    return min(prompt + max(likely, generated + 1), most)


class Pool:
    """Requests of which whoever is urgent, or was overtaken `most_overtakes` times, is next, fit or
    not; so nobody is overtaken more often. Overtakes are counted in an array.
    """

    def __init__(self, most_overtakes: int) -> None:
        self._most_overtakes = most_overtakes
        self._waiting: dict[int, Waiting] = {}
        self._overtaken = np.full(64, _TAKEN, dtype=np.int64)  # of the request `_base` and later
        self._base = 0
        self._first = self._end = 0  # places there: all that wait are from the one to the other
        self._holds_for: int | None = None  # the request that is next, whether it fits or not

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_held(self) -> bool:
        return self._holds_for is not None

    def add(self, waiting: Waiting) -> None:
        request = waiting.request
        if not self._base <= request < self._base + len(self._overtaken):
            self._extend(request)
        place = request - self._base
        if not self._waiting:
            self._first, self._end = place, place + 1
        self._waiting[request] = waiting
        self._overtaken[place] = self._most_overtakes if waiting.is_urgent else 0
        self._first, self._end = min(self._first, place), max(self._end, place + 1)
        if self._overtaken[place] >= self._most_overtakes:
            self._holds_for = request if self._holds_for is None else min(request, self._holds_for)

    def take(self, waiting: Waiting) -> None:
        self._overtaken[self._first : waiting.request - self._base] += 1
        self.give_up(waiting.request)

    def give_up(self, request: int) -> None:
        del self._waiting[request]
        self._overtaken[request - self._base] = _TAKEN
        while self._first < self._end and self._overtaken[self._first] < 0:
            self._first += 1
        held = self._overtaken[self._first : self._end] >= self._most_overtakes
        is_held = held.any()
        self._holds_for = self._base + self._first + int(held.argmax()) if is_held else None

    def _extend(self, request: int) -> None:
        """Make room in the array for a request before or after those that it has."""
        kept = self._overtaken[self._first : self._end]
        begin = self._base + self._first if self._waiting else request
        base = min(begin, request)
        length = max(begin + len(kept), request + 1) - base
        self._overtaken = np.full(64 + 2 * length, _TAKEN, dtype=np.int64)
        self._first = begin - base
        self._end = self._first + len(kept)
        self._overtaken[self._first : self._end] = kept
        self._base = base


def doubled(size: int, most: int) -> int:
    return min(2 * size, most)


class LongestFirst(Pool):
    """A pool of which the longest reservation that fits is next (decreasing first fit). Sizes are
    bisected: taking one of thousands takes microseconds.
    """

    def __init__(self, most_overtakes: int) -> None:
        super().__init__(most_overtakes)
        self._by_size: list[tuple[int, int]] = []  # sorted pairs of -size and number

    def add(self, waiting: Waiting) -> None:
        super().add(waiting)
        insort(self._by_size, (-waiting.size, waiting.request))

    def give_up(self, request: int) -> None:
        size = self._waiting[request].size
        super().give_up(request)
        del self._by_size[bisect_left(self._by_size, (-size, request))]

    def next(self, available: int) -> Waiting | None:
        if self._holds_for is not None:
            held = self._waiting[self._holds_for]
            return held if held.size <= available else None
        place = bisect_left(self._by_size, (-available, -1))
        return self._waiting[self._by_size[place][1]] if place < len(self._by_size) else None


class S3Policy(OrcaPolicy):
    """As `orca` for the longest that fits, within `max_batch_tokens` also when computed again."""

    def __init__(self, sizes: OrcaSizes, stages: int) -> None:
        super().__init__(sizes, stages)
        self.chunk = sizes.prefill_chunk_tokens or sizes.max_batch_tokens
        self.most_overtakes = OVERTAKES_PER_SLOT * self.slots
        self.queue = LongestFirst(self.most_overtakes)
        self._most_waiting = most_waiting(sizes, stages)

    def wants(self, ready: int) -> bool:
        return len(self.queue) < self._most_waiting


class Outgrown(NamedTuple):
    """A ready request whose next token has no room in `size` slots, and the `larger` range that it
    asks for.
    """

    number: int
    size: int
    larger: int


def supervised(short: Sequence[Outgrown], available: int) -> Iterator[tuple[Outgrown, bool]]:
    """Yield requests in the order of arrival, and whether each grows or is preempted: back to the
    pool, urgent. The last to come is preempted first.
    """
    while short:
        left: list[Outgrown] = []
        for each in short:
            more = each.larger - each.size
            if more > available:
                left.append(each)
                continue
            available -= more
            yield each, True
        if left:
            last = left.pop()
            available += last.size
            yield last, False
        short = left


class _Decoding(NamedTuple):
    cohort: Cohort
    step: int
    text: int


class S3Schedule(OrcaSchedule):
    """The order of passes of `rows`, with a full pool; preempted requests are computed again."""

    def __init__(self, rows: JobRows, sizes: OrcaSizes, stages: int) -> None:
        self._decoding: dict[int, _Decoding] = {}
        super().__init__(rows, sizes, stages)
        self._most_waiting = most_waiting(sizes, stages)
        self._again: set[int] = set()
        self.grown = self.preempted = self.recomputed_tokens = 0

    def _make_policy(self, sizes: OrcaSizes, stages: int) -> OrcaPolicy:
        return S3Policy(sizes, stages)

    def _first_reservations(self, rows: JobRows) -> list[int]:
        expected: Sequence[int | None] = rows.expected or [None] * len(self._most)
        return list(map(first_reservation_of, self._texts, self._most, expected))

    def _larger(self, request: int) -> int:
        """The range that a request asks for which outgrows its own."""
        return doubled(self._reserved[request], self._most[request])

    def _again_with(self, outgrown: Outgrown) -> int:
        """The range with which a preempted request comes back."""
        return outgrown.larger

    def _begin(self) -> None: ...

    def _select(self, cohort: Cohort) -> list[tuple[int, int]]:
        self._draw(self._most_waiting)
        if cohort.step in cohort.outgrows:
            self._supervise(cohort, cohort.outgrows.pop(cohort.step))
        if len(cohort.prompts) > 1:
            cohort.prompts.sort(key=lambda each: each.request)
        return super()._select(cohort)

    def _supervise(self, cohort: Cohort, short: list[int]) -> None:
        outgrown = [Outgrown(r, self._reserved[r], self._larger(r)) for r in sorted(short)]
        for each, grows in supervised(outgrown, self._available):
            if not grows:
                self._preempt(cohort, each)
                continue
            self._available += each.size - each.larger
            self._reserved[each.number] = each.larger
            self.grown += 1
            self._note_outgrowing(cohort, each.number)

    def _preempt(self, cohort: Cohort, outgrown: Outgrown) -> None:
        request = outgrown.number
        began = self._decoding.pop(request)
        steps = cohort.step - began.step
        context = began.text + steps
        cohort.decoding -= 1
        cohort.context_tokens -= context
        last = began.step + self._outputs[request] - 1
        cohort.ends[last].remove((request, began.text + self._outputs[request] - 1))
        self._texts[request] = context + 1
        self._outputs[request] -= steps + 1
        self._available += outgrown.size
        self._running -= 1
        self.preempted += 1
        self.recomputed_tokens += context
        self._reserved[request] = self._again_with(outgrown)
        self._again.add(request)
        self._policy.queue.add(self._waiting_of(request, is_urgent=True))

    def _take(self, waiting: Waiting) -> None:
        super()._take(waiting)
        self.prefilled -= waiting.request in self._again

    def _decode(self, cohort: Cohort, request: int, text: int, steps: int) -> None:
        super()._decode(cohort, request, text, steps)
        self._decoding[request] = _Decoding(cohort, cohort.step, text)
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
