"""The order of passes of a job or batch under `exegpt` with a schedule `rra` (ExeGPT section 4.1),
by `RraPolicy`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

from planner.schedule.passes import (
    JobRows,
    Pass,
    TurnSizes,
    prefill_pass,
    reservations,
    rounded_mean,
)
from planner.schedule.static import UNDER_WAY_PER_STAGE
from planner.schedule.turns import RraPolicy, TurnGroup
from quant.common.errors import SpecError

Request = TypeVar("Request")


class DecodingRequests(Generic[Request]):
    """The requests of a group that decode; `context_tokens`: of all before the next step."""

    def __init__(self) -> None:
        self.size = self.context_tokens = self.steps = 0
        self._ends: dict[int, list[tuple[Request, int]]] = {}

    def join(self, request: Request, prompt: int, steps: int) -> None:
        self.size += 1
        self.context_tokens += prompt
        self._ends.setdefault(self.steps + steps, []).append((request, prompt + steps))

    def step(self) -> list[Request]:
        self.steps += 1
        self.context_tokens += self.size
        ended = self._ends.pop(self.steps, [])
        self.size -= len(ended)
        self.context_tokens -= sum(context for _, context in ended)
        return [request for request, _ in ended]


class RraSchedule:
    """The runtime's decisions for `rows`; SpecError for sizes below 1, a request that needs more
    slots than there are, and schedules whose stages only prefill or decode.
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
        self._reserved = reservations(rows, sizes.n_slots)
        self._mixed = len(set(self._prompts)) > 1
        self._sizes = sizes
        prefill, decode = sizes.prefill_micro_batch, sizes.decode_micro_batch
        self._policy = RraPolicy(sizes.schedule, decode, prefill)
        self._decoding: dict[int, DecodingRequests[int]] = defaultdict(DecodingRequests)
        self._limit = UNDER_WAY_PER_STAGE * stages
        self._n_rsrv = self._running = self._results = 0
        self.prefilled = 0
        """The requests that have taken part in a turn."""
        self.turn = 0, 0
        """The group of the last turn that had newcomers, and the number of the first of these."""
        self._first_of_turn = 0
        self.ended: list[tuple[int, int]] = []
        """The requests that have ended, in this order, and after how many results each had."""
        self.in_flight: list[int] = []
        """How many requests had a reservation when each pass was submitted."""

    @property
    def ended_after(self) -> Sequence[int]:
        """After how many results each request had ended, in the order in which they did."""
        return [results for _, results in self.ended]

    def passes(self) -> Iterator[Pass]:
        """Every pass, in the first stage's order of computing."""
        under_way: deque[tuple[TurnGroup, list[int]]] = deque()
        prefills = 0
        while True:
            following = self._policy.next(self) if len(under_way) < self._limit else None
            if following is not None:
                group, new = following
                under_way.append(following)
                self.in_flight.append(self._running)
                if new:
                    if new[0] == self._first_of_turn:
                        self.turn = group.index, new[0]
                    part = range(new[0], new[0] + len(new))
                    yield prefill_pass(self._prompts, part, prefills, self._results, self._mixed)
                    prefills += 1
                else:
                    yield self._decode_pass(group)
            elif under_way:
                self._complete(*under_way.popleft())
            else:
                return

    def _decode_pass(self, group: TurnGroup) -> Pass:
        decoding = self._decoding[group.index]
        size, step = decoding.size, decoding.steps + 1
        context = rounded_mean(decoding.context_tokens, size)
        return Pass("decode", group.index, step, size, 1, context, self._results)

    @property
    def waiting(self) -> int:
        return len(self._prompts) - self.prefilled

    def front(self, most: int) -> tuple[Sequence[int], int]:
        self._first_of_turn = self.prefilled  # asked for once, as a turn begins
        return self._prompts[self.prefilled : self.prefilled + most], 0

    def room_for(self, wanted: int) -> int:
        left, joining, first = self._sizes.n_slots - self._n_rsrv, 0, self.prefilled
        room = min(wanted, self._sizes.slots - self._running)
        for size in islice(self._reserved, first, first + room):
            left -= size
            if left < 0:
                break
            joining += 1
        return joining

    def take(self, count: int) -> list[int]:
        first = self.prefilled
        self.prefilled += count
        self._n_rsrv += sum(self._reserved[first : self.prefilled])
        self._running += count
        return list(range(first, self.prefilled))

    def _complete(self, group: TurnGroup, prefilled: list[int]) -> None:
        self._results += 1
        decoding = self._decoding[group.index]
        ended = [] if prefilled else decoding.step()
        for request in prefilled:
            steps = self._outputs[request] - 1
            if steps:
                decoding.join(request, self._prompts[request], steps)
            else:
                ended.append(request)
        for request in ended:
            self._n_rsrv -= self._reserved[request]
            self._running -= 1
            self.ended.append((request, self._results))
        self._policy.leave(group, len(ended))
        self._policy.take_back(group)
