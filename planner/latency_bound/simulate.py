"""Simulation of schedules event by event: lengths drawn at random, decisions of the runtime."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import ceil, sqrt

import numpy as np

from planner.latency_bound.placed_layers import PipelineOfRequests, StageCopies, WaaSides
from planner.latency_bound.timeline import StageSeconds, unlimited
from planner.lengths import (
    SUM_TOLERANCE,
    FloatArray,
    IntArray,
    LengthDistribution,
    RequestLengths,
)
from planner.schedule.exegpt import DecodingRequests, RraSchedule
from planner.schedule.exegpt_waa import DecodeSide, PrefillSide, PromptBatch, WaaRun
from planner.schedule.passes import JobRows, TurnSizes
from planner.schedule.turns import evened, free_tokens, that_fit
from planner.scheduling import RequestSchedule

_EVEN = 1024
"""Successive requests whose lengths are as frequent as in the distribution, to one request: drawn
each for itself, 29 to 52 of 4,000 are among the longest 1 %, and latency goes by these."""

_STRATA, _ERROR_PARTS, _ALIKE = 200, 10, 20
"""Classes of answers by length that are equally frequent, parts of what was seen by which its error
is stated, and requests beside which each of a part stands there."""


@dataclass(slots=True, eq=False)
class DrawnRequest:
    """A request of so many tokens that began with its turn; noted, or only to keep stages busy."""

    prompt: int
    output: int
    began_s: float = 0.0
    noted: bool = False


class RequestQueue:
    def __init__(self, lengths: RequestLengths, generator: np.random.Generator) -> None:
        self.lengths, self._generator = lengths, generator
        self._waiting: deque[DrawnRequest] = deque()

    def front(self, schedule: RequestSchedule, wanted: int, most: int) -> list[DrawnRequest]:
        """About `wanted` requests, at most `most`, with even prompts (ExeGPT section 5.2)."""
        while len(self._waiting) < most:
            self._waiting += drawn_requests(self.lengths, _EVEN, self._generator)
        first = list(islice(self._waiting, most))
        return first[: evened(schedule, wanted, most, [each.prompt for each in first])]

    def take(self, count: int) -> list[DrawnRequest]:
        return [self._waiting.popleft() for _ in range(count)]


def drawn_requests(
    lengths: RequestLengths, count: int, generator: np.random.Generator
) -> list[DrawnRequest]:
    """Requests with prompts and answers each in random order, even in every `_EVEN` of them."""
    found: list[DrawnRequest] = []
    while len(found) < count:
        prompts, outputs = (
            each.spread(_EVEN, generator).tolist() for each in (lengths.prompts, lengths.outputs)
        )
        found += map(DrawnRequest, prompts, outputs)
    return found[:count]


@dataclass(frozen=True, eq=False)
class ObservedRequests:
    """Seen after a warm-up: how many came, as many as ended, a second, and `latencies_s` in the
    order in which they ended. Their answers are of `strata`, each of which counts as it is
    `frequent`, and not as it was drawn.
    """

    requests_per_s: float
    latencies_s: FloatArray
    strata: IntArray
    frequent: FloatArray

    @classmethod
    def of(
        cls,
        rate: float,
        latencies_s: Sequence[float],
        answers: Sequence[int],
        outputs: LengthDistribution,
    ) -> ObservedRequests:
        """Of requests with these answers, which are to be as frequent as in `outputs`."""
        stratum_of, frequent = outputs.strata(_STRATA)
        strata = stratum_of[np.searchsorted(outputs.lengths, answers)]
        return cls(rate, np.array(latencies_s), strata, frequent)

    @property
    def mean_latency_s(self) -> float:
        return float(self._weights @ self.latencies_s)

    def latency_s(self, quantile: float) -> float:
        """The least latency that at least this share of requests does not exceed."""
        order = np.argsort(self.latencies_s)
        reached = np.cumsum(self._weights[order])
        place = int(np.searchsorted(reached, quantile - SUM_TOLERANCE))
        return float(self.latencies_s[order[min(place, len(order) - 1)]])

    def latency_error_s(self, quantile: float) -> float:
        """Two standard errors of it: by how many requests more exceed it than others with answers
        about as long, in parts that ended one after the other.
        """
        exceed = self.latencies_s > self.latency_s(quantile)
        alike = self.strata * max(1, len(exceed) // _ALIKE) // len(self.frequent)
        usual = np.bincount(alike, exceed) / np.maximum(np.bincount(alike), 1)
        surplus = self._weights * (exceed - usual[alike])
        parts = [float(each.sum()) for each in np.array_split(surplus, _ERROR_PARTS)]
        share = 2 * sqrt(_ERROR_PARTS) * float(np.std(parts, ddof=1))
        # among those alike, its place is a matter of chance; beyond them answers are others
        place, at_s = sqrt(_ALIKE) / len(exceed), self.latency_s(quantile)
        beside_s = at_s - self.latency_s(quantile - place), self.latency_s(quantile + place) - at_s
        spread_s = self.latency_s(quantile + share) - self.latency_s(quantile - share)
        return max(spread_s / 2, min(beside_s))

    @cached_property
    def _weights(self) -> FloatArray:
        """What each request counts, in all 1."""
        seen = np.bincount(self.strata, minlength=len(self.frequent))
        weights = (self.frequent / np.maximum(seen, 1))[self.strata]
        return np.asarray(weights / weights.sum())


class RequestWatch:
    """Notes requests after `warm_up` others, until at least `counted` began and ended. Their time
    is bounded by turns of the same group, as others come at other moments of a cycle. Simulations
    call `check_time` before each pass, which raises what ends them early.
    """

    def __init__(
        self, warm_up: int, counted: int, check_time: Callable[[], None] = unlimited
    ) -> None:
        self._warm_up, self._counted, self.check_time = warm_up, counted, check_time
        self._begun = self._noted = self._pending = 0
        self._from_s: float | None = None
        self._to_s: float | None = None
        self._latencies_s: list[float] = []
        self._answers: list[int] = []

    @property
    def requests(self) -> int:
        """The fewest that have to begin."""
        return self._warm_up + self._counted

    @property
    def done(self) -> bool:
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
        for request in requests:
            if request.noted:
                self._pending -= 1
                self._latencies_s.append(now_s - request.began_s)
                self._answers.append(request.output)

    def observed(self, outputs: LengthDistribution) -> ObservedRequests:
        assert self._from_s is not None
        assert self._to_s is not None
        rate = self._noted / (self._to_s - self._from_s)
        return ObservedRequests.of(rate, self._latencies_s, self._answers, outputs)


_QUEUE = 2.0
"""Times the requests that begin, in the mean, while the last ones that count end: as many are in
the queue beyond these."""


def simulate_rra(
    times: StageSeconds,
    lengths: RequestLengths,
    schedule: RequestSchedule,
    watch: RequestWatch,
    generator: np.random.Generator,
    n_slots: int | None = None,
) -> ObservedRequests:
    """Simulate the passes of `planner.schedule.exegpt` from empty groups; requests reserve for the
    longest answer (`n_slots` None: enough for all).
    """
    requests = drawn_requests(lengths, watch.requests + _queued(lengths, schedule), generator)
    rows = JobRows(
        [each.prompt for each in requests],
        [each.output for each in requests],
        [each.prompt + lengths.outputs.longest for each in requests],
    )
    sizes = TurnSizes.of(schedule, sum(rows.reserved or ()) if n_slots is None else n_slots)
    run, pipeline = RraSchedule(rows, sizes, times.stages), PipelineOfRequests(times)
    backs_s, begun, ended = [0.0], 0, 0
    for each in run.passes():
        at_s = backs_s[each.results_before]
        for request, results in run.ended[ended:]:
            watch.end([requests[request]], backs_s[results])
        ended = len(run.ended)
        if watch.done:
            break
        watch.check_time()
        if each.phase == "decode":
            tokens = each.requests * each.context_length
            backs_s.append(pipeline.decode(each.requests, tokens, at_s))
            continue
        newcomers = requests[begun : begun + each.requests]
        watch.begin(newcomers, at_s, run.turn == (0, begun))
        begun += each.requests
        backs_s.append(pipeline.prefill([each.prompt for each in newcomers], at_s))
    return watch.observed(lengths.outputs)


def _queued(lengths: RequestLengths, schedule: RequestSchedule) -> int:
    turns = ceil(lengths.outputs.longest / schedule.decode_steps) + 2
    begin = turns * (schedule.prefill_requests + schedule.decode_micro_batches)
    return ceil(_QUEUE * begin) + 2 * schedule.decode_requests


def simulate_waa(
    sides: WaaSides,
    schedule: RequestSchedule,
    watch: RequestWatch,
    generator: np.random.Generator,
    n_slots: int | None = None,
) -> ObservedRequests:
    """Simulate what the runtime does from empty stages; latencies count from a prefill's
    submission. Requests reserve token slots as in `simulate_rra`.
    """
    handover, queue = sides.handover, RequestQueue(sides.lengths, generator)
    slots = TokenSlots(sides.lengths.outputs.longest, n_slots)
    prefill = _DrawnPrefills(sides.prefill, handover.keep, queue, schedule, watch, slots)
    decode = _DrawnDecodes(sides.decode, handover.restore, prefill.going, schedule, watch, slots)
    run = WaaRun(schedule, prefill, decode, handover.sent_s)
    while not watch.done:
        watch.check_time()
        run.advance()
    return watch.observed(sides.lengths.outputs)


@dataclass
class TokenSlots:
    """Token slots where requests decode, which reserve them for the `longest` answer: `begun` of
    all that have begun, `decoding` of those there. `n_slots` None: enough for all.
    """

    longest: int
    n_slots: int | None
    begun: int = 0
    decoding: int = 0

    def needs(self, requests: Iterable[DrawnRequest]) -> list[int]:
        return [each.prompt + self.longest for each in requests]

    def end(self, requests: Sequence[DrawnRequest], decoded: bool) -> None:
        tokens = sum(self.needs(requests))
        self.begun -= tokens
        self.decoding -= tokens if decoded else 0


class _DrawnPrefills(PrefillSide):
    """Prefills of drawn requests; those `going` on are in the order in which they come back."""

    def __init__(
        self,
        times: StageSeconds,
        keep: StageCopies,
        queue: RequestQueue,
        schedule: RequestSchedule,
        watch: RequestWatch,
        slots: TokenSlots,
    ) -> None:
        super().__init__(schedule, queue.lengths.prompts.longest, times.stages)
        self._slots = slots
        self._pipeline = PipelineOfRequests(times, keep)
        self._schedule, self._queue, self._watch = schedule, queue, watch
        self._waits: deque[DrawnRequest] = deque()
        self._ending: deque[list[DrawnRequest]] = deque()  # with each micro-batch under way
        self.going: deque[DrawnRequest] = deque()

    def next_turn(self, wanted: int, room: int) -> Sequence[int]:
        first, slots = self._queue.front(self._schedule, wanted, room), self._slots
        needs = slots.needs(first)
        count = len(first)
        if slots.n_slots is not None:
            free = free_tokens(slots.n_slots, slots.begun, self.leaving, self.in_flight)
            count = max(that_fit(needs, free), 0 if self.in_flight else min(count, 1))
        slots.begun += sum(needs[:count])
        taken = self._queue.take(count)
        self._waits.extend(taken)
        return [each.prompt for each in taken]

    def run(self, prompts: Sequence[int], now_s: float) -> tuple[float, Sequence[bool]]:
        taken = [self._waits.popleft() for _ in prompts]
        self._watch.begin(taken, now_s, bounds=True)
        going = [each for each in taken if each.output > 1]
        self.going.extend(going)
        self._ending.append([each for each in taken if each.output == 1])
        # which answers will end at once is not known
        kept = prompts if self._queue.lengths.outputs.longest > 1 else ()
        back_s = self._pipeline.prefill(prompts, now_s, kept)
        return back_s, [each.output > 1 for each in taken]

    def take_back(self) -> PromptBatch:
        batch, ending = super().take_back(), self._ending.popleft()
        self._watch.end(ending, batch.back_s)
        self._slots.end(ending, decoded=False)
        return batch


class _DrawnDecodes(DecodeSide[DecodingRequests[DrawnRequest]]):
    """Steps of drawn requests, which join in the order in which they are `going` on."""

    def __init__(
        self,
        times: StageSeconds,
        restore: StageCopies,
        going: deque[DrawnRequest],
        schedule: RequestSchedule,
        watch: RequestWatch,
        slots: TokenSlots,
    ) -> None:
        most, self._slots = schedule.most_in_flight, slots
        in_group = -(-most // schedule.decode_micro_batches)
        super().__init__([DecodingRequests() for _ in range(-(-most // in_group))], in_group)
        self._pipeline = PipelineOfRequests(times, restore)
        self._going, self._watch = going, watch

    def fitting(self, joining: int) -> int:
        if self._slots.n_slots is None:
            return joining
        needs = self._slots.needs(islice(self._going, joining))
        return that_fit(needs, self._slots.n_slots - self._slots.decoding)

    def step(self, group: DecodingRequests[DrawnRequest], joining: int, now_s: float) -> float:
        new = [self._going.popleft() for _ in range(joining)]
        self._slots.decoding += sum(self._slots.needs(new))
        for each in new:
            group.join(each, each.prompt, each.output - 1)
        restored = [each.prompt for each in new]
        return self._pipeline.decode(group.size, group.context_tokens, now_s, restored)

    def end(self, group: DecodingRequests[DrawnRequest], now_s: float) -> int:
        ended = group.step()
        self._watch.end(ended, now_s)
        self._slots.end(ended, decoded=True)
        return len(ended)
