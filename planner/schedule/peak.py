"""The policy `s3`: whoever joins keeps the predicted peak of memory within the token slots.

Ranges grow with the answers, so that a request that has just begun holds little. What all requests
in flight will hold together is foreseen by predicted lengths (S3), which are corrected by how long
answers became: where the most of it, at the end of one of them, stays within the token slots with
another request, that one joins. The first that fits does, so that prompts stay as mixed as they
came; but whoever might end after all others goes first, so that a job has no long end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from planner.lengths import BoolArray, IntArray
from planner.schedule.orca import OrcaPolicy, Waiting
from planner.schedule.passes import JobRows, OrcaSizes
from planner.schedule.s3 import Outgrown, Pool, S3Policy, S3Schedule
from planner.scheduling import GROWTH
from planner.workload import MAX_TOKENS

KINDS = 2 * MAX_TOKENS.bit_length()


def first_range(tokens: int, most: int) -> int:
    """Token slots of a request that joins with so many tokens, of at most `most`."""
    return min(tokens + GROWTH, most)


def larger_range(size: int, most: int, available: int, requests: int) -> int:
    """Token slots of a range of `size` that is full, where so many are available to so many
    requests: by half of an even share, so that where memory is ample ranges seldom move.
    """
    return min(size + max(GROWTH, available // (2 * requests)), most)


def expected_answer(limit: int, expected: int | None) -> int:
    """New tokens that are expected of a request which may have so many: within that, at least 1."""
    return limit if expected is None else max(1, min(expected, limit))


class Experience:
    """How much shorter answers became than was expected of them, by what was: expectations within
    half an octave learn together, as those of one bucket of a predictor do.

    Requests that have not ended count as expected, so that the short ones, which end first, do not
    speak for all.
    """

    def __init__(self) -> None:
        self._expected = np.zeros(KINDS, dtype=np.int64)  # in all, of those that joined
        self._less = np.zeros(KINDS, dtype=np.int64)  # of those that ended

    def begin(self, expected: int) -> None:
        self._expected[_kind(expected)] += expected

    def end(self, expected: int, answer: int) -> None:
        self._less[_kind(expected)] += expected - answer

    def left(self, foreseen: IntArray) -> IntArray:
        """Tokens by which requests [n] will still grow, of what is `foreseen` [n, 4] of them. An
        answer that is longer than expected is foreseen to grow by a quarter of what it has.
        """
        _, given, expected, limit = foreseen.T
        kinds = np.frexp(expected * expected)[1]
        in_all = self._expected[kinds]
        share = expected * (in_all - self._less[kinds])
        learnt = np.maximum(-(-share // np.maximum(in_all, 1)), 1)
        answers = np.where(in_all > 0, learnt, expected)
        more = given + np.maximum(GROWTH, given // 4)
        answers = np.where(answers > given, answers, more)
        return np.asarray(np.minimum(answers, limit) - 1 - given, dtype=np.int64)


def _kind(expected: int) -> int:
    return (expected * expected).bit_length()


class Peak:
    """The memory of requests [n] that each grow by a token an iteration until they end: `tokens`
    now, and `left` to come.
    """

    def __init__(self, tokens: IntArray, left: IntArray) -> None:
        order = left.argsort()
        self._left = left[order]
        self._tokens = np.append(tokens[order][::-1].cumsum()[::-1], 0)  # of those that end later
        running = np.arange(len(left), 0, -1)
        at_ends = self._tokens[:-1] + (running + 1) * self._left  # with one more, which has grown
        self._most = np.append(0, np.maximum.accumulate(at_ends))

    def __len__(self) -> int:
        return len(self._left)

    def with_another(self, tokens: IntArray, left: IntArray) -> IntArray:
        """The most until its end where one of these [m] joins."""
        most = self._most[self._left.searchsorted(left, "right")]
        later = self._left.searchsorted(left)
        at_its_end = self._tokens[later] + (len(self._left) - later + 1) * left
        return np.asarray(tokens + np.maximum(most, at_its_end), dtype=np.int64)


class FirstThatFits(Pool):
    """A pool of which the first to come that fits is next: by its range, and by the peak of those
    that are `running` [n, 4] with it; but those that might end after all others go first. Where
    nobody fits, nobody is looked at before something has changed (`changed`).
    """

    def __init__(
        self,
        most_overtakes: int,
        sizes: OrcaSizes,
        slots: int,
        experience: Experience,
        running: Callable[[], IntArray],
    ) -> None:
        super().__init__(most_overtakes)
        self._n_slots, self._slots = sizes.n_slots, slots
        self._experience, self._running = experience, running
        self._in_order = np.zeros((0, 6), np.int64)  # number, size, foreseen; none that is urgent
        self._held: IntArray | None = None  # what is foreseen of those that run
        self._is_settled = False

    def changed(self) -> None:
        self._is_settled = False

    def begin(self) -> None:
        """A selection begins: those that joined in the last one run by now."""
        self._held = None

    def add(self, waiting: Waiting) -> None:
        super().add(waiting)
        if not waiting.is_urgent:
            row = [waiting.request, waiting.size, *waiting.foreseen]
            self._in_order = np.append(self._in_order, [row], axis=0)
        self.changed()

    def take(self, waiting: Waiting) -> None:
        super().take(waiting)
        if not waiting.is_urgent:
            self._experience.begin(waiting.foreseen[2])
        self._held = np.append(self._in_flight(), [waiting.foreseen], axis=0)

    def give_up(self, request: int) -> None:
        super().give_up(request)
        place = int(self._in_order[:, 0].searchsorted(request))
        if place < len(self._in_order) and self._in_order[place, 0] == request:
            self._in_order = np.delete(self._in_order, place, axis=0)
        self.changed()

    def next(self, available: int) -> Waiting | None:
        if self._is_settled or not self._waiting:
            return None
        looked_at = self._in_order
        if self._holds_for is not None:
            held = self._waiting[self._holds_for]
            looked_at = np.array([[held.request, held.size, *held.foreseen]], np.int64)
        fits = looked_at[:, 1] <= available
        if fits.any():
            found = self._below_peak(looked_at, fits)
            if found is not None:
                return self._waiting[found]
        self._is_settled = True
        return None

    def _below_peak(self, looked_at: IntArray, fits: BoolArray) -> int | None:
        """The number of the first of those that have room for their range and below the peak."""
        tokens, left = self._foreseen(self._in_flight())
        more, longer = self._foreseen(looked_at[:, 2:])
        if len(left):  # what is empty of a range that grows counts for nothing where nobody runs
            fits = fits & (Peak(tokens, left).with_another(more, longer) <= self._n_slots)
        if not fits.any():
            return None
        in_all = np.append(tokens, more), np.append(left, longer)
        _, given, expected, _ = looked_at[:, 2:].T
        at_most = np.maximum(expected - 1 - given, longer)
        may_end_last = at_most >= self._iterations(*in_all)
        first = np.where(fits, at_most * may_end_last, -1).argmax()
        return int(looked_at[first, 0])

    def _iterations(self, tokens: IntArray, left: IntArray) -> int:
        """How many it takes at least to end all requests [n], by memory and by slots."""
        held = int((left * (tokens + left // 2)).sum()) // self._n_slots
        return max(held, int(left.sum()) // self._slots)

    def _in_flight(self) -> IntArray:
        if self._held is None:
            self._held = self._running()
        return self._held

    def _foreseen(self, requests: IntArray) -> tuple[IntArray, IntArray]:
        """Tokens now, with what of a range's growth is empty in the mean, and those to come."""
        left = self._experience.left(requests)
        return requests[:, 0] + np.minimum(GROWTH // 2, left), left


class PeakPolicy(S3Policy):
    """As of the published `s3`, for the first that fits below the predicted peak."""

    def __init__(self, sizes: OrcaSizes, stages: int, running: Callable[[], IntArray]) -> None:
        super().__init__(sizes, stages)
        self.experience = Experience()
        self.pool = self.queue = FirstThatFits(
            self.most_overtakes, sizes, self.slots, self.experience, running
        )

    def admitted(
        self, requests: int, tokens: int, available: int, free: int | None = None
    ) -> list[Waiting]:
        self.pool.begin()
        return super().admitted(requests, tokens, available, free)


class PeakSchedule(S3Schedule):
    """The order of passes of `rows` by the predicted peak."""

    def __init__(self, rows: JobRows, sizes: OrcaSizes, stages: int) -> None:
        self._prompts, self._answers = rows.prompts, rows.outputs
        self._expected: list[int] = []
        self._runs: set[int] = set()
        super().__init__(rows, sizes, stages)

    def _make_policy(self, sizes: OrcaSizes, stages: int) -> OrcaPolicy:
        self._by_peak = PeakPolicy(sizes, stages, self._running_requests)
        return self._by_peak

    def _first_reservations(self, rows: JobRows) -> list[int]:
        limits = (most - prompt for most, prompt in zip(self._most, self._texts, strict=True))
        expected: Sequence[int | None] = rows.expected or [None] * len(self._most)
        self._expected = list(map(expected_answer, limits, expected))
        return list(map(first_range, self._texts, self._most))

    def _foreseen(self, request: int, tokens: int) -> tuple[int, int, int, int]:
        prompt = self._prompts[request]
        limit = self._most[request] - prompt
        return tokens, tokens - prompt, self._expected[request], limit

    def _running_requests(self) -> IntArray:
        found = []
        for request in self._runs:
            tokens = self._texts[request]
            if request in self._decoding:
                cohort, step, text = self._decoding[request]
                tokens = text + 1 + cohort.step - step
            found.append(self._foreseen(request, tokens))
        return np.array(found, dtype=np.int64).reshape(-1, 4)

    def _larger(self, request: int) -> int:
        sizes = self._reserved[request], self._most[request]
        return larger_range(*sizes, self._available, self._running)

    def _again_with(self, outgrown: Outgrown) -> int:
        request = outgrown.number
        self._runs.discard(request)
        return first_range(self._texts[request], self._most[request])

    def _waiting_of(self, request: int, is_urgent: bool = False) -> Waiting:
        waiting = super()._waiting_of(request, is_urgent)
        return waiting._replace(foreseen=self._foreseen(request, self._texts[request]))

    def _take(self, waiting: Waiting) -> None:
        super()._take(waiting)
        self._runs.add(waiting.request)

    def _leave(self, request: int) -> None:
        super()._leave(request)
        self._runs.discard(request)
        self._by_peak.experience.end(self._expected[request], self._answers[request])
        self._by_peak.pool.changed()
