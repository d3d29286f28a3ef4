"""The policy `orca` (ORCA, Algorithm 1): whoever came first is selected, for every iteration anew.
Where all requests are there from the beginning, those selected together come back and are selected
together again, with newcomers in the places of those that ended. So a job has few cohorts, which
are counted: only requests that come, are prefilled in parts, or end are looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from planner.lengths import IntArray
from planner.schedule.passes import JobRows, OrcaSizes, Pass, reservations, rounded_mean
from quant.common.errors import SpecError


class Waiting(NamedTuple):
    """A waiting request with `text` tokens to prefill, `size` slots to reserve; urgent first. Of
    `s3` what is `foreseen`: tokens of prompt and answer so far, those of the answer, how many are
    expected of it and the most that it may have.
    """

    request: int
    text: int
    size: int
    is_urgent: bool = False
    foreseen: tuple[int, int, int, int] = (0, 0, 0, 0)


class WaitingQueue(Protocol):
    """Requests that wait for a reservation, in a policy's order, until taken or given up."""

    def __len__(self) -> int: ...

    def add(self, waiting: Waiting) -> None: ...

    def next(self, available: int) -> Waiting | None:
        """The next request for so many token slots; None where none fits or can fit."""

    def take(self, waiting: Waiting) -> None: ...

    def give_up(self, request: int) -> None: ...


class FirstCome:
    """First come, first served: no later request overtakes one for which there is no room."""

    def __init__(self) -> None:
        self._queue: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, waiting: Waiting) -> None:
        self._queue.append(waiting)

    def next(self, available: int) -> Waiting | None:
        if self._queue and self._queue[0].size <= available:
            return self._queue[0]
        return None

    def take(self, waiting: Waiting) -> None:
        self._queue.popleft()

    def give_up(self, request: int) -> None:
        self._queue = deque(each for each in self._queue if each.request != request)


class OrcaPolicy:
    """Who of the ready and waiting requests makes up the next micro-batch, with which part of its
    prompt. Of the paper: n_workers is `most_under_way`, max_bs `sizes.max_batch_size`, n_slots less
    n_rsrv is `available`; INITIATION is `queue`, INCREMENT ready. Beyond it, prompts may come in
    parts, and a micro-batch of several stays within `sizes.max_batch_tokens`. A request reserves
    only when every ready one is in the same micro-batch, so at most `stages` times `max_batch_size`
    have a reservation.
    """

    def __init__(self, sizes: OrcaSizes, stages: int) -> None:
        self.sizes = sizes
        self.most_under_way = stages  # one a stage, so that each has one
        self.slots = stages * sizes.max_batch_size  # number all that have a reservation
        self.chunk = sizes.prefill_chunk_tokens
        self.queue: WaitingQueue = FirstCome()

    def part(self, tokens: int) -> int:
        return min(tokens, self.chunk) if self.chunk else tokens

    def wants(self, ready: int) -> bool:
        """Whether a selection with so many ready requests could come to the end of the queue."""
        return len(self.queue) + ready < self.sizes.max_batch_size

    def selected(self, tokens: IntArray) -> int:
        """How many ready requests are selected; `tokens` [ready]: of the first, first two, ..."""
        most = self.sizes.max_batch_tokens
        return max(1, int(tokens.searchsorted(most, "right"))) if most else len(tokens)

    def admitted(
        self, requests: int, tokens: int, available: int, free: int | None = None
    ) -> list[Waiting]:
        """Take out of the queue who joins so many ready requests; where these alone exceed the
        tokens, nobody does. At most `free` do: there may be fewer slots than `self.slots`.
        """
        most, most_tokens = self.sizes.max_batch_size, self.sizes.max_batch_tokens
        most = most if free is None else min(most, requests + free)
        found: list[Waiting] = []
        while requests < most and (waiting := self.queue.next(available)) is not None:
            count = self.part(waiting.text)
            if most_tokens and tokens and tokens + count > most_tokens:
                break
            self.queue.take(waiting)
            found.append(waiting)
            requests, tokens, available = requests + 1, tokens + count, available - waiting.size
        return found


@dataclass(frozen=True, slots=True)
class MixedPass(Pass):
    """A pass in which `decodes` requests make a step after `decode_context` tokens in the mean, and
    others a part of their prompt: `parts` has the tokens before it and its own. With parts it
    counts as prefill; a last single token of a prompt is among the steps.
    """

    decodes: int = 0
    decode_context: int = 0
    parts: tuple[tuple[int, int], ...] = ()

    @property
    def all_tokens(self) -> int:
        return self.decodes + sum(count for _, count in self.parts)


@dataclass(slots=True)
class PromptParts:
    request: int
    written: int


@dataclass(slots=True)
class Cohort:
    """Requests that run together. `ends` has, by step, requests and their context after it;
    `outgrows`, of `s3`, those that have no room for that step's token.
    """

    prompts: list[PromptParts] = field(default_factory=list)
    decoding: int = 0
    step: int = 0
    context_tokens: int = 0
    ends: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    outgrows: dict[int, list[int]] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return len(self.prompts) + self.decoding


class OrcaSchedule:
    """The order of passes of `rows`; SpecError for sizes below 1 and requests too large."""

    def __init__(self, rows: JobRows, sizes: OrcaSizes, stages: int) -> None:
        if min(sizes.max_batch_size, stages) < 1:
            raise SpecError(
                f"micro-batches of {sizes.max_batch_size} on {stages} stages cannot be simulated; "
                "give at least 1 of each"
            )
        self._texts, self._outputs = list(rows.prompts), list(rows.outputs)
        self._shared = rows.shared
        self._most = reservations(rows, sizes.n_slots)
        self._policy = self._make_policy(sizes, stages)
        self._reserved = self._first_reservations(rows)
        self._queued = 0
        self._available = sizes.n_slots
        self._running = self._results = 0
        self.prefilled = 0
        """The requests that have been selected."""
        self.ended_after: list[int] = []
        """After how many results each request had ended, in the order in which they did."""
        self.in_flight: list[int] = []
        """How many requests had a reservation when each pass was submitted."""

    def _make_policy(self, sizes: OrcaSizes, stages: int) -> OrcaPolicy:
        return OrcaPolicy(sizes, stages)

    def _first_reservations(self, rows: JobRows) -> list[int]:
        return self._most

    def _begin(self) -> None:
        self._draw(len(self._outputs))

    def passes(self) -> Iterator[MixedPass]:
        """Every pass, in the first stage's order of computing."""
        self._begin()
        under_way: deque[Cohort] = deque()
        ready, index, most = Cohort(), 0, self._policy.most_under_way
        while True:
            if len(under_way) < most:
                parts = self._select(ready)
                if ready.requests:
                    self.in_flight.append(self._running)
                    yield self._pass(ready, parts, index)
                    index += 1
                    under_way.append(ready)
                    ready = Cohort()
                    continue
            if not under_way:
                return
            ready = under_way.popleft()
            self._complete(ready)

    def _select(self, cohort: Cohort) -> list[tuple[int, int]]:
        policy = self._policy
        parts: list[tuple[int, int]] = []
        tokens = cohort.decoding
        for prompt in cohort.prompts:
            count = policy.part(self._texts[prompt.request] - prompt.written)
            parts.append((prompt.written, count))
            tokens += count
            prompt.written += count
        free = policy.sizes.slots - self._running if policy.sizes.slots else None
        for waiting in policy.admitted(cohort.requests, tokens, self._available, free):
            count, there = policy.part(waiting.text), self._there(waiting.request)
            self._take(waiting)
            cohort.prompts.append(PromptParts(waiting.request, there + count))
            parts.append((there, count))
        return parts

    def _there(self, request: int) -> int:
        """Tokens of a request's text that are restored, so that at least one is computed."""
        return min(self._shared, self._texts[request] - 1)

    def _draw(self, most: int) -> None:
        while self._queued < len(self._outputs) and len(self._policy.queue) < most:
            self._policy.queue.add(self._waiting_of(self._queued))
            self._queued += 1

    def _waiting_of(self, request: int, is_urgent: bool = False) -> Waiting:
        text = self._texts[request] - self._there(request)
        return Waiting(request, text, self._reserved[request], is_urgent)

    def _take(self, waiting: Waiting) -> None:
        self.prefilled += 1
        self._running += 1
        self._available -= waiting.size

    def _pass(self, cohort: Cohort, parts: list[tuple[int, int]], index: int) -> MixedPass:
        steps = [start for start, count in parts if start and count == 1]
        if steps:
            parts = [each for each in parts if not (each[0] and each[1] == 1)]
        decodes = cohort.decoding + len(steps)
        context = cohort.context_tokens + sum(steps)
        requests = decodes + len(parts)
        tokens = decodes + sum(count for _, count in parts)
        before = context + sum(start for start, _ in parts)
        return MixedPass(
            phase="prefill" if parts else "decode",
            index=index,
            step=cohort.step,
            requests=requests,
            tokens=rounded_mean(tokens, requests),
            context_length=rounded_mean(before, requests),
            results_before=self._results,
            decodes=decodes,
            decode_context=rounded_mean(context, decodes) if decodes else 0,
            parts=tuple(parts),
        )

    def _complete(self, cohort: Cohort) -> None:
        self._results += 1
        cohort.step += 1
        cohort.context_tokens += cohort.decoding
        for request, context in cohort.ends.pop(cohort.step, ()):
            cohort.decoding -= 1
            cohort.context_tokens -= context
            self._leave(request)
        still: list[PromptParts] = []
        for each in cohort.prompts:
            request, text = each.request, self._texts[each.request]
            if each.written < text:
                still.append(each)
                continue
            steps = self._outputs[request] - 1
            if steps:
                self._decode(cohort, request, text, steps)
            else:
                self._leave(request)
        cohort.prompts = still

    def _decode(self, cohort: Cohort, request: int, text: int, steps: int) -> None:
        cohort.decoding += 1
        cohort.context_tokens += text
        ends = cohort.ends.setdefault(cohort.step + steps, [])
        ends.append((request, text + steps))

    def _leave(self, request: int) -> None:
        self._available += self._reserved[request]
        self._running -= 1
        self.ended_after.append(self._results)
