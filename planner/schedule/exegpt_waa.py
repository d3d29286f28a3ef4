"""What a schedule `waa-c` or `waa-m` decides from event to event: which prompts begin, and which
requests join a group that decodes (ExeGPT section 3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

from planner.schedule.turns import WAITING, PrefillSizes, joining, newcomers
from planner.scheduling import RequestSchedule


class PromptBatch(NamedTuple):
    """A micro-batch of `tokens` each, which of them `go_on`, when it was submitted and is back."""

    tokens: Sequence[int]
    go_on: Sequence[bool]
    began_s: float
    back_s: float


class PrefillSide(ABC):
    """Stages that prefill: prompts that wait, and the micro-batches under way."""

    def __init__(self, schedule: RequestSchedule, longest: int, stages: int) -> None:
        self._sizes = PrefillSizes.of(schedule, longest)
        self.stages = stages
        self.requests = 0
        self.leaving = self.in_flight = 0  # as a turn begins
        self._waiting: deque[int] = deque()
        self._waiting_tokens = 0
        self._under_way: deque[PromptBatch] = deque()

    @abstractmethod
    def next_turn(self, wanted: int, room: int) -> Sequence[int]:
        """Tokens of the prompts of a turn of about so many requests, and at most `room`."""

    @abstractmethod
    def run(self, prompts: Sequence[int], now_s: float) -> tuple[float, Sequence[bool]]:
        """Submit a micro-batch; returns when it is back, and which of its requests go on."""

    @property
    def next_s(self) -> float:
        return self._under_way[0].back_s if self._under_way else inf

    def turn(self, wanted: int, room: int) -> int:
        """Have the requests of a turn wait; returns how many these are."""
        prompts = self.next_turn(wanted, room) if room > 0 else ()
        self._waiting.extend(prompts)
        self._waiting_tokens += sum(prompts)
        self.requests += len(prompts)
        return len(prompts)

    def submit(self, now_s: float) -> None:
        while self._waiting and len(self._under_way) < self.stages + WAITING:
            count = self._sizes.next_part(self._waiting, self._waiting_tokens)
            prompts = [self._waiting.popleft() for _ in range(count)]
            self._waiting_tokens -= sum(prompts)
            back_s, go_on = self.run(prompts, now_s)
            self._under_way.append(PromptBatch(prompts, go_on, now_s, back_s))

    def take_back(self) -> PromptBatch:
        batch = self._under_way.popleft()
        self.requests -= len(batch.tokens)
        return batch


class _Sized(Protocol):
    size: int


Group = TypeVar("Group", bound=_Sized)


class DecodeSide(ABC, Generic[Group]):
    """Groups, each with a step under way or resting; requests that `arrived` join between two
    steps.
    """

    def __init__(self, groups: Sequence[Group], most_in_group: int) -> None:
        self._count, self._most_in_group = len(groups), most_in_group
        self.resting = deque(groups)
        self.stepping: deque[tuple[float, Group]] = deque()
        self.arrived = 0
        self.in_groups = sum(group.size for group in groups)

    @abstractmethod
    def step(self, group: Group, joining: int, now_s: float) -> float:
        """Have so many requests join a group, and submit its step; returns when that is back."""

    def fitting(self, joining: int) -> int:
        """For how many of so many that join there is memory."""
        return joining

    @abstractmethod
    def end(self, group: Group, now_s: float) -> int:
        """Count a step that is back; returns how many have ended with it."""

    @property
    def next_s(self) -> float:
        return self.stepping[0][0] if self.stepping else inf

    def submit(self, now_s: float) -> None:
        """Have every resting group make a step that has requests, in the order of their coming."""
        for _ in range(len(self.resting)):
            group = self.resting.popleft()
            more = 0
            if self.arrived:
                all_requests = self.in_groups + self.arrived
                more = joining(group.size, all_requests, self._count, self._most_in_group)
                more = self.fitting(min(more, self.arrived))
                self.arrived -= more
                self.in_groups += more
            if group.size + more:
                self.stepping.append((self.step(group, more, now_s), group))
            else:
                self.resting.append(group)

    def take_back(self) -> int:
        now_s, group = self.stepping.popleft()
        ended = self.end(group, now_s)
        self.in_groups -= ended
        self.resting.append(group)
        return ended


class WaaRun(Generic[Group]):
    """Both sides under `schedule`; a message with so many prompts, of so many tokens together,
    takes `sent_s`.
    """

    def __init__(
        self,
        schedule: RequestSchedule,
        prefill: PrefillSide,
        decode: DecodeSide[Group],
        sent_s: Callable[[int, int], float],
    ) -> None:
        self._schedule, self._sent_s = schedule, sent_s
        self._prefill, self._decode = prefill, decode
        self._decoding = decode.in_groups
        # Those that end before a request which begins now is prefilled: as many as the last time.
        self._leaving = self._ended = 0
        self._ended_before: deque[int] = deque()  # when each began that prefills
        self._moving: deque[tuple[float, int]] = deque()
        self._moved_s = 0.0
        self._begin(0.0)

    def advance(self) -> None:
        """Take what is back first, and begin what may begin then."""
        decoded_s, prefilled_s = self._decode.next_s, self._prefill.next_s
        moved_s = self._moving[0][0] if self._moving else inf
        now_s = min(decoded_s, moved_s, prefilled_s)
        if decoded_s == now_s:
            ended = self._decode.take_back()
            self._decoding -= ended
            self._ended += ended
        elif moved_s == now_s:
            self._decode.arrived += self._moving.popleft()[1]
        else:
            self._hand_over(self._prefill.take_back())
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        prefill = self._prefill
        while True:
            prefill.in_flight = self._decoding + prefill.requests
            prefill.leaving = min(self._leaving, prefill.in_flight)
            present = self._decoding + max(0, prefill.requests - self._leaving)
            more = prefill.turn(
                *newcomers(self._schedule, prefill.stages, present, prefill.requests)
            )
            if not more:
                break
            self._ended_before.extend([self._ended] * more)
        prefill.submit(now_s)
        self._decode.submit(now_s)

    def _hand_over(self, batch: PromptBatch) -> None:
        for goes_on in batch.go_on:
            self._leaving = self._ended - self._ended_before.popleft()
            self._ended += not goes_on
        going = sum(batch.go_on)
        self._decoding += going
        if going:
            gone = list(compress(batch.tokens, batch.go_on))
            sent_s = self._sent_s(len(gone), sum(gone))
            self._moved_s = max(self._moved_s, batch.back_s) + sent_s
            self._moving.append((self._moved_s, going))
