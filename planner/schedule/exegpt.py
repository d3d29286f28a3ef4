"""The order of passes of a job, or of one batch, under the policy `exegpt` with a schedule `rra`
(ExeGPT, section 4.1).

The first stage's actor runs it (`actors.schedule.exegpt`). Requests are divided into groups, each
of which takes a turn of newcomers, whose prompts are prefilled, and then makes a number of decode
steps. As with `static`, decisions depend on lengths but not on time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from planner.schedule.policy_sizes import TurnSizes
from planner.schedule.static import UNDER_WAY_PER_STAGE, JobRows, Pass, rounded_mean
from planner.schedule.turns import GroupTurn, Turns, even_parts
from quant.common.errors import SpecError


@dataclass(slots=True)
class _Group:
    """A group: `decoding` requests, `parts` of newcomers whose prefills are to be submitted, and
    those that are `prefilling`; `steps_left` before its next turn.

    `context_tokens` are those before the next step of all that decode. `ends` has, by number of the
    step that gives them their last token, requests and their context after it.
    """

    index: int
    credit: int
    parts: deque[list[int]] = field(default_factory=deque)
    prefilling: int = 0
    decoding: int = 0
    under_way: int = 0
    is_due: bool = False
    steps_left: int = 0
    ended: int = 0
    step: int = 0
    context_tokens: int = 0
    ends: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether it has no request, not even one whose prompt is under way."""
        return not (self.parts or self.prefilling or self.decoding)


@dataclass(slots=True)
class _Submitted:
    """A micro-batch under way: a prefill of these requests, or a decode step."""

    group: _Group
    prefill: list[int]


class RraSchedule:
    """The decisions of `actors.schedule.exegpt` and `actors.schedule.driver` for a queue of `rows`.

    Every request runs all of its output tokens. Raises SpecError for sizes below 1, for a request
    that needs more token slots than there are, and for a schedule of stages that only prefill or
    decode.
    """

    def __init__(self, rows: JobRows, sizes: TurnSizes, stages: int) -> None:
        if sizes.schedule.divides:
            raise SpecError(f"a schedule {sizes.schedule.kind} has no turns that can be simulated")
        if min(sizes.slots, sizes.prefill_micro_batch, sizes.decode_micro_batch, stages) < 1:
            raise SpecError(
                f"{sizes.slots} slots, prefills of {sizes.prefill_micro_batch} and groups of "
                f"{sizes.decode_micro_batch} on {stages} stages cannot be simulated; give at least "
                "1 of each"
            )
        self._prompts, self._outputs = list(rows.prompts), list(rows.outputs)
        self._reserved = list(
            rows.reserved or map(sum, zip(rows.prompts, rows.outputs, strict=True))
        )
        most = max(self._reserved, default=0)
        if most > sizes.n_slots:
            raise SpecError(
                f"a request needs {most} token slots, but there are {sizes.n_slots} in all; give "
                "n_slots of at least that"
            )
        self._mixed = len(set(self._prompts)) > 1
        self._sizes = sizes
        self._turns = Turns.of(sizes.schedule, sizes.decode_micro_batch)
        self._groups = [_Group(i, self._turns.first_credit(i)) for i in range(self._turns.groups)]
        self._limit = UNDER_WAY_PER_STAGE * stages
        self._due: deque[_Group] = deque()
        self._next_request = self._n_rsrv = self._running = self._results = 0
        self._turn = 0, 0
        self._ended: list[tuple[int, int]] = []
        self._in_flight: list[int] = []

    @property
    def prefilled(self) -> int:
        """The requests that have taken part in a turn."""
        return self._next_request

    @property
    def turn(self) -> tuple[int, int]:
        """The group of the last turn that had newcomers, and the number of the first of these."""
        return self._turn

    @property
    def ended(self) -> Sequence[tuple[int, int]]:
        """The requests that have ended, in this order, and after how many results each had."""
        return self._ended

    @property
    def ended_after(self) -> Sequence[int]:
        """After how many results each request had ended, in the order in which they did."""
        return [results for _, results in self._ended]

    @property
    def in_flight(self) -> Sequence[int]:
        """How many requests had a reservation when each pass was submitted."""
        return self._in_flight

    def passes(self) -> Iterator[Pass]:
        """Every pass, in the first stage's order of computing."""
        under_way: deque[_Submitted] = deque()
        prefills = 0
        while True:
            following = self._following() if len(under_way) < self._limit else None
            if following is not None:
                under_way.append(following)
                self._in_flight.append(self._running)
                if following.prefill:
                    yield self._prefill_pass(following.prefill, prefills)
                    prefills += 1
                else:
                    yield self._decode_pass(following.group)
            elif under_way:
                self._complete(under_way.popleft())
            else:
                return

    def _prefill_pass(self, requests: list[int], index: int) -> Pass:
        first, size = requests[0], len(requests)
        prompts = tuple(self._prompts[first : first + size]) if self._mixed else ()
        tokens = rounded_mean(sum(prompts), size) if prompts else self._prompts[first]
        return Pass("prefill", index, 0, size, tokens, 0, self._results, prompts)

    def _decode_pass(self, group: _Group) -> Pass:
        requests = group.decoding
        context = rounded_mean(group.context_tokens - requests, requests)
        return Pass("decode", group.index, group.step, requests, 1, context, self._results)

    def _following(self) -> _Submitted | None:
        """The next micro-batch: groups follow each other in the order in which they got ready."""
        self._wake()
        while self._due:
            group = self._due[0]
            if not (group.parts or group.steps_left or self._waits(group)):
                self._begin_turn(group)
            if group.parts:
                return self._prefill(group)
            self._leave_due()
            if group.decoding:
                return self._step(group)
        return None

    def _wake(self) -> None:
        """Give empty groups a turn as soon as a request waits."""
        for group in self._groups:
            if group.is_empty and not group.is_due:
                if self._waiting:
                    self._come_due(group)
                else:
                    group.ended = 0

    @property
    def _waiting(self) -> int:
        return len(self._prompts) - self._next_request

    def _waits(self, group: _Group) -> bool:
        """Whether another group comes to its turn soon, and this one goes on until then."""
        steps = (each.steps_left for each in self._groups)
        return not group.is_empty and self._turns.is_near(steps)

    def _begin_turn(self, group: _Group) -> None:
        """Let newcomers join, where some wait; those of one prefill follow each other."""
        joining = self._newcomers(group)
        group.ended = 0
        if not self._waiting:
            return
        group.credit = self._turns.next_credit(group.credit)
        for part in even_parts(joining, self._sizes.prefill_micro_batch):
            first = self._next_request
            group.parts.append(list(range(first, first + part)))
            self._n_rsrv += sum(self._reserved[first : first + part])
            self._next_request += part
        self._running += joining
        if joining:
            self._turn = group.index, self._next_request - joining
        group.steps_left = 0 if group.is_empty else self._sizes.schedule.decode_steps

    def _newcomers(self, group: _Group) -> int:
        first, share = self._next_request, self._turns.most
        if group.is_empty:
            share = -(-self._waiting // sum(each.is_empty for each in self._groups))
        turn = GroupTurn(group.decoding, group.ended, group.credit, share)
        wanted = self._turns.newcomers(turn, self._prompts[first : first + self._turns.most])
        left, joining = self._sizes.n_slots - self._n_rsrv, 0
        room = min(wanted, self._sizes.slots - self._running)
        for size in islice(self._reserved, first, first + room):
            left -= size
            if left < 0:
                break
            joining += 1
        return joining

    def _prefill(self, group: _Group) -> _Submitted:
        requests = group.parts.popleft()
        group.prefilling += len(requests)
        group.under_way += 1
        if not group.parts:
            self._leave_due()
        return _Submitted(group, requests)

    def _step(self, group: _Group) -> _Submitted:
        group.steps_left = max(0, group.steps_left - 1)
        group.step += 1
        group.context_tokens += group.decoding
        group.under_way += 1
        return _Submitted(group, [])

    def _complete(self, done: _Submitted) -> None:
        """Take in the tokens of a pass: the requests that have their last one leave."""
        self._results += 1
        group = done.group
        group.under_way -= 1
        group.prefilling -= len(done.prefill)
        for request in done.prefill:
            prompt, steps = self._prompts[request], self._outputs[request] - 1
            if steps:
                group.decoding += 1
                group.context_tokens += prompt
                ends = group.ends.setdefault(group.step + steps, [])
                ends.append((request, prompt + steps))
            else:
                self._end(group, request)
        if not done.prefill:
            for request, context in group.ends.pop(group.step, ()):
                group.decoding -= 1
                group.context_tokens -= context
                self._end(group, request)
        if group.is_empty:
            group.steps_left = 0
        elif not group.under_way and not group.parts:
            self._come_due(group)

    def _end(self, group: _Group, request: int) -> None:
        group.ended += 1
        self._n_rsrv -= self._reserved[request]
        self._running -= 1
        self._ended.append((request, self._results))

    def _come_due(self, group: _Group) -> None:
        group.is_due = True
        self._due.append(group)

    def _leave_due(self) -> None:
        self._due.popleft().is_due = False
