"""The order of passes of a job, or of one batch, under the policy `orca` (ORCA, Algorithm 1).

The first stage's actor runs it (`actors.schedule.orca`). Where all requests are there from the
beginning, whoever was selected together comes back together and is selected together again, with
newcomers in the places of those that ended: when a micro-batch is back, all others are under way,
and nobody else is ready. So the requests in flight are a few cohorts, each of which is counted and
not looked at one by one: only those count that come, that are prefilled in parts, and that end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from planner.schedule.policy_sizes import OrcaSizes
from planner.schedule.static import JobRows, Pass, rounded_mean
from quant.common.errors import SpecError


@dataclass(frozen=True, slots=True)
class MixedPass(Pass):
    """One pass in which `decodes` requests make a decode step, after `decode_context` tokens in the
    mean, and the others a part of their prompt each: `parts` has the tokens before it and its own.

    It counts as a prefill where it has such parts; `index` is its number. A single token that ends
    a prompt given in parts is among the decode steps.
    """

    decodes: int = 0
    decode_context: int = 0
    parts: tuple[tuple[int, int], ...] = ()

    @property
    def all_tokens(self) -> int:
        """The tokens that all of its requests add."""
        return self.decodes + sum(count for _, count in self.parts)


@dataclass(slots=True)
class Prompt:
    """A request that is prefilled: its number and the tokens that are under way or there."""

    request: int
    written: int


@dataclass(slots=True)
class Cohort:
    """Requests that run together: those that are prefilled, and `decoding` ones.

    `context_tokens` are those before the next step of all that decode. `ends` has, by number of
    the step that gives them their last token, requests and their context after it. `outgrows` has,
    by number of the step, requests that have no room for its token; only `s3` uses it.
    """

    prompts: list[Prompt] = field(default_factory=list)
    decoding: int = 0
    step: int = 0
    context_tokens: int = 0
    ends: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    outgrows: dict[int, list[int]] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        """Number of its requests."""
        return len(self.prompts) + self.decoding


class OrcaSchedule:
    """The decisions of `actors.schedule.orca` and `actors.schedule.driver` for a queue of `rows`.

    Every request runs all of its output tokens. Raises SpecError for sizes below 1, and for a
    request that needs more token slots than there are.
    """

    def __init__(self, rows: JobRows, sizes: OrcaSizes, stages: int) -> None:
        if min(sizes.max_batch_size, stages) < 1:
            raise SpecError(
                f"micro-batches of {sizes.max_batch_size} on {stages} stages cannot be simulated; "
                "give at least 1 of each"
            )
        self._texts, self._outputs = list(rows.prompts), list(rows.outputs)
        self._reserved = list(
            rows.reserved or map(sum, zip(rows.prompts, rows.outputs, strict=True))
        )
        most = max(self._reserved, default=0)
        if most > sizes.n_slots:
            raise SpecError(
                f"a request needs {most} token slots, but there are {sizes.n_slots} in all; give "
                "n_slots of at least that"
            )
        self._sizes, self._stages = sizes, stages
        self._chunk = sizes.prefill_chunk_tokens
        self._n_rsrv = self._running = 0
        self._next_request = 0
        self._results = 0
        self._ended_after: list[int] = []
        self._in_flight: list[int] = []

    @property
    def prefilled(self) -> int:
        """The requests that have been selected."""
        return self._next_request

    @property
    def ended_after(self) -> Sequence[int]:
        """After how many results each request had ended, in the order in which they did."""
        return self._ended_after

    @property
    def in_flight(self) -> Sequence[int]:
        """How many requests had a reservation when each pass was submitted."""
        return self._in_flight

    def passes(self) -> Iterator[MixedPass]:
        """Every pass, in the first stage's order of computing."""
        under_way: deque[Cohort] = deque()
        ready = Cohort()
        index = 0
        while True:
            if len(under_way) < self._stages:
                parts = self._select(ready)
                if ready.requests:
                    self._in_flight.append(self._running)
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
        """Let newcomers join; returns the part of a prompt that each prefilled request gets."""
        parts: list[tuple[int, int]] = []
        tokens = cohort.decoding
        for prompt in cohort.prompts:
            count = self._part(prompt.request, prompt.written)
            parts.append((prompt.written, count))
            tokens += count
            prompt.written += count
        most = self._sizes.max_batch_tokens
        requests = cohort.requests
        while requests < self._sizes.max_batch_size:
            request = self._next()
            if request is None:
                break
            count = self._part(request, 0)
            if most and tokens and tokens + count > most:
                break
            self._take(request)
            self._running += 1
            cohort.prompts.append(Prompt(request, count))
            parts.append((0, count))
            tokens += count
            requests += 1
        return parts

    def _next(self) -> int | None:
        """The next request that gets a reservation; None where there is none, or no room for it."""
        request = self._next_request
        if request == len(self._reserved):
            return None
        return request if self._reserved[request] <= self._available else None

    def _take(self, request: int) -> None:
        """Give the next request its reservation."""
        self._next_request += 1
        self._n_rsrv += self._reserved[request]

    @property
    def _available(self) -> int:
        return self._sizes.n_slots - self._n_rsrv

    def _part(self, request: int, written: int) -> int:
        left = self._texts[request] - written
        return min(left, self._chunk) if self._chunk else left

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
        """Take in the tokens of a pass: the requests that have their last one leave."""
        self._results += 1
        cohort.step += 1
        cohort.context_tokens += cohort.decoding
        for request, context in cohort.ends.pop(cohort.step, ()):
            cohort.decoding -= 1
            cohort.context_tokens -= context
            self._leave(request)
        still: list[Prompt] = []
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
        """Let a request make its decode steps from the next pass on, `text` tokens before them."""
        cohort.decoding += 1
        cohort.context_tokens += text
        ends = cohort.ends.setdefault(cohort.step + steps, [])
        ends.append((request, text + steps))

    def _leave(self, request: int) -> None:
        self._n_rsrv -= self._reserved[request]
        self._running -= 1
        self._ended_after.append(self._results)
