"""The requests of a run on stages that prefill and stages that decode: where each of them is, and
when more prompts begin, so that those which decode are kept full, but no fuller (ExeGPT, section
5.2).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

from actors.messages import HostKey, Progress, Request
from actors.schedule.request_slots import most_tokens
from actors.schedule.scheduler import QueueSizes
from planner.schedule.turns import (
    SHORT_PROMPTS,
    evened,
    free_tokens,
    newcomers,
    that_fit,
)
from planner.scheduling import RequestSchedule
from quant.common.errors import SpecError


@dataclass(frozen=True)
class Load:
    """The requests in flight: those whose prompts wait for being `prefilling` or are, and those
    that are handed over and `decoding`. So many are `leaving` before one that begins now is
    prefilled, as it was the last time.

    `host_tokens`: the tokens of prompts whose keys and values lie, or will lie, in host memory;
    `reserved`: the most tokens that all of them may have.
    """

    prefilling: int = 0
    decoding: int = 0
    leaving: int = 0
    host_tokens: int = 0
    reserved: int = 0

    @property
    def arriving(self) -> int:
        """By how much there will be more decoding when all are prefilled."""
        return max(0, self.prefilling - self.leaving)


class PrefillPace:
    """Says how many prompts make the next turn, by a `schedule` that divides the phases.

    A turn has `prefill_requests`. It begins when at most `decode_requests` are decoding, those
    counted that will by then, and is smaller where there would be more than the tolerance allows.
    Prompts are taken in their order, so many that they have the tokens of as many of the mean.
    There is a turn for each of the `stages` that prefill, and one that waits. Nothing begins for
    which there is no room in host memory, or in the slots of the stages that decode.

    `prefill_tokens`, `decode_tokens`: the most tokens of a request on either kind of stages.
    """

    def __init__(
        self, schedule: RequestSchedule, stages: int, prefill: QueueSizes, decode: QueueSizes
    ) -> None:
        self._schedule = schedule
        self._stages, self._slots = stages, decode.slots
        self._host_tokens = min(prefill.parked_tokens, decode.parked_tokens)
        self._kv_tokens = decode.n_slots or decode.kv_tokens
        self.prefill_tokens, self.decode_tokens = prefill.slot_tokens, decode.slot_tokens

    def follow(self, schedule: RequestSchedule) -> None:
        """Have turns begin by another schedule from now on; any thread may call this."""
        self._schedule = schedule

    @property
    def ahead(self) -> int:
        """Requests that should wait for the next turn: as many may be taken, if they are short."""
        return SHORT_PROMPTS * self._schedule.prefill_requests

    def turn(self, waiting: Sequence[Request], load: Load) -> int:
        """How many of those `waiting`, in their order, begin now; one alone has any size."""
        present = load.decoding + load.arriving
        wanted, room = newcomers(self._schedule, self._stages, present, load.prefilling)
        room = min(room, self._slots - present)
        texts = [len(request.prompt_ids) for request in waiting]
        even = evened(self._schedule, min(wanted, room), room, texts)
        in_flight, free = load.prefilling + load.decoding, self._host_tokens - load.host_tokens
        tokens = free_tokens(self._kv_tokens, load.reserved, load.leaving, in_flight)
        joining = waiting[:even]
        taken = min(that_fit(texts[:even], free), that_fit(map(most_tokens, joining), tokens))
        return max(taken, 0 if in_flight else min(even, 1))


Place = Literal["waiting", "prefilling", "moving", "decoding"]
"""Not begun yet, on the stages that prefill, on its way to those that decode, or there."""


@dataclass(eq=False)
class _Held:
    """A request that has not ended, with the `tokens` that were told of; its keys and values lie in
    host memory under `number`, on either side, until it is restored or prefilled again.
    """

    request: Request
    number: int
    place: Place = "waiting"
    tokens: list[int] = field(default_factory=list)
    ended_before: int = 0  # requests that had ended when it began
    began_s: float | None = None  # its prefill, where that is known
    has_host_tokens: bool = False

    @property
    def so_far(self) -> Request:
        return replace(self.request, generated=(*self.request.generated, *self.tokens))


class DividedLedger:
    """Keeps the requests of a run in the order of their coming, and says which begin next; `pace`
    says how many. `numbers` are those of keys, each of which is used once.

    Requests that have tokens already, as after a switch from other stages, and those that are too
    long for the stages which prefill, go to those that decode at once; so do all that cannot be
    run, of which these tell why.
    """

    def __init__(
        self,
        pace: PrefillPace,
        numbers: Iterator[int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pace = pace
        self._clock = clock
        self._numbers = numbers
        self._held: dict[str, _Held] = {}
        self._waiting: deque[str] = deque()
        self._ended = 0
        self._leaving = 0  # as in `Load`
        self._unwanted: list[int] = []  # of requests given up while they were prefilled

    def add(self, request: Request) -> None:
        """Have a request wait; SpecError for one that is there already."""
        if request.custom_id in self._held:
            raise SpecError(f"custom_id {request.custom_id!r:.80} is in the run twice")
        self._held[request.custom_id] = _Held(request, next(self._numbers))
        self._waiting.append(request.custom_id)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def wanted(self) -> int:
        """How many more should wait, so that the next turn can be chosen."""
        return max(0, self._pace.ahead - len(self._waiting))

    def has_any(self, *places: Place) -> bool:
        return any(held.place in places for held in self._held.values())

    @property
    def unfinished(self) -> tuple[Request, ...]:
        return tuple(held.so_far for held in self._held.values())

    @property
    def tokens(self) -> dict[str, int]:
        found = {name: held.so_far.generated for name, held in self._held.items()}
        return {name: len(tokens) for name, tokens in found.items() if tokens}

    def load(self) -> Load:
        begun = [held for held in self._held.values() if held.place != "waiting"]
        prefilling = sum(held.place == "prefilling" for held in begun)
        return Load(
            prefilling,
            len(begun) - prefilling,
            min(self._leaving, len(begun)),
            sum(len(held.request.prompt_ids) for held in begun if held.has_host_tokens),
            sum(most_tokens(held.request) for held in begun),
        )

    def begin(self) -> tuple[list[Request], list[Request]]:
        """The next turn's requests, on stages that prefill and stages that decode."""
        waiting = [self._held[name].request for name in islice(self._waiting, self._pace.ahead)]
        turn = self._pace.turn(waiting, self.load()) if waiting else 0
        chosen = [self._held[self._waiting.popleft()] for _ in range(turn)]
        prefill: list[Request] = []
        decode: list[Request] = []
        for held in chosen:
            held.ended_before = self._ended
            if self._goes_to_decode(held.request):
                held.place = "decoding"
                decode.append(held.request)
                continue
            held.place = "prefilling"
            goes_on = held.request.max_new_tokens > 1
            held.has_host_tokens = goes_on
            key = HostKey(held.number) if goes_on else None
            prefill.append(
                replace(held.request, max_new_tokens=1, expected_tokens=None, host_key=key)
            )
        return prefill, decode

    def _goes_to_decode(self, request: Request) -> bool:
        prompt, new = len(request.prompt_ids), request.max_new_tokens
        pace = self._pace
        has_room = prompt + 1 <= pace.prefill_tokens and prompt + new <= pace.decode_tokens
        return bool(request.generated) or not has_room or new < 1

    def prefilled(
        self, progress: Sequence[Progress]
    ) -> tuple[list[Progress], tuple[str, ...], list[int]]:
        """Take in the first tokens of requests; returns what to tell of, the ids of those that go
        on to other stages, and the numbers of others whose keys and values nobody wants.
        """
        told: list[Progress] = []
        moving: list[str] = []
        unwanted: list[int] = []
        for each in progress:
            held = self._held.get(each.custom_id)
            if held is None or held.place != "prefilling":
                continue
            self._leaving = self._ended - held.ended_before
            unwanted += self._unwanted_before(held.number)
            if each.finish_reason == "length" and held.request.max_new_tokens > 1:
                held.tokens += each.token_ids
                held.place = "moving"
                if each.age_s is not None:
                    held.began_s = self._clock() - each.age_s
                moving.append(each.custom_id)
                told.append(replace(each, finish_reason=None, age_s=None))
                continue
            if held.has_host_tokens:
                unwanted.append(held.number)
            told.append(each)
            self._end(each.custom_id)
        return told, tuple(moving), unwanted

    def _unwanted_before(self, number: int) -> list[int]:
        """Numbers of requests that were given up and are prefilled by now: they began earlier."""
        found = [each for each in self._unwanted if each < number]
        self._unwanted = [each for each in self._unwanted if each > number]
        return found

    def number_of(self, custom_id: str) -> int:
        return self._held[custom_id].number

    def prompt_tokens_of(self, custom_ids: Sequence[str]) -> int:
        return sum(len(self._held[name].request.prompt_ids) for name in custom_ids)

    def moved(
        self, custom_ids: Sequence[str], arrived: Collection[int], epoch: int
    ) -> tuple[Request, ...]:
        """Requests that decode from now on, with the keys that `arrived` in `epoch`."""
        found: list[Request] = []
        for name in custom_ids:
            held = self._held.get(name)
            if held is None or held.place != "moving":
                continue
            held.place = "decoding"
            held.has_host_tokens = held.number in arrived
            key = HostKey(held.number, epoch) if held.has_host_tokens else None
            age_s = None if held.began_s is None else self._clock() - held.began_s
            found.append(replace(held.so_far, host_key=key, age_s=age_s))
        return tuple(found)

    def decoded(self, progress: Sequence[Progress]) -> tuple[Progress, ...]:
        """Take in tokens of decode steps; returns what to tell of."""
        told: list[Progress] = []
        for each in progress:
            held = self._held.get(each.custom_id)
            if held is None:
                continue
            held.tokens += each.token_ids
            held.has_host_tokens = False  # it is restored
            told.append(each)
            if each.finish_reason is not None:
                self._end(each.custom_id)
        return tuple(told)

    def _end(self, custom_id: str) -> None:
        del self._held[custom_id]
        self._ended += 1

    def cancel(self, custom_id: str) -> Place | None:
        """Forget a request; returns where it is (None: nowhere, as it has ended)."""
        held = self._held.pop(custom_id, None)
        if held is None:
            return None
        if held.place == "waiting":
            self._waiting.remove(custom_id)
        elif held.place == "prefilling" and held.has_host_tokens:
            self._unwanted.append(held.number)
        return held.place
