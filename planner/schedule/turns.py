"""What a schedule `rra` decides: when a group takes its turn, and how many newcomers join it
(ExeGPT sections 4.1, 5.2). A turn has `prefill_requests / groups` newcomers, and in too small a
group as many more as ended in it. A group so grows by the newcomers of one turn at a time, and its
requests have unlike ages: in simulations of six kinds of lengths groups filled at once had 0.8 to
2.3 % of their first requests above the 99th percentile of the steady state, those that grow 0.5 to
1.2 %; jobs of 3,000 requests took 0.2 to 0.7 % longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, islice, takewhile
from math import ceil, floor
from typing import Protocol

from planner.scheduling import RequestSchedule


@dataclass(slots=True, eq=False)
class TurnGroup:
    """A group whose `parts` are newcomers still to be prefilled; `ended` counts requests since the
    last turn, `credit` what is left over of earlier turns, in shares of a newcomer.
    """

    index: int
    credit: int
    requests: int = 0
    ended: int = 0
    parts: deque[list[int]] = field(default_factory=deque)
    under_way: int = 0
    steps_left: int = 0
    is_due: bool = False

    @property
    def is_at_turn(self) -> bool:
        return not (self.parts or self.under_way or self.steps_left)


@dataclass(frozen=True)
class Turns:
    """The turns of `groups` groups of `least` to `most` requests in the steady state."""

    schedule: RequestSchedule
    groups: int
    least: int
    most: int

    @classmethod
    def of(cls, schedule: RequestSchedule, most_requests: int | None = None) -> Turns:
        """Turns of as many groups as decode micro-batches, or as keep to `most_requests` each."""
        groups = schedule.decode_micro_batches
        found = cls._of_groups(schedule, groups)
        while most_requests is not None and found.most > max(1, most_requests):
            groups += 1
            found = cls._of_groups(schedule, groups)
        return found

    @classmethod
    def _of_groups(cls, schedule: RequestSchedule, groups: int) -> Turns:
        """The numbers of requests next to the mean one are always among those of a group."""
        mean, tolerance = Fraction(schedule.decode_requests, groups), schedule.exact_tolerance
        least = min(floor(mean), ceil(mean * (1 - tolerance)))
        return cls(schedule, groups, least, max(ceil(mean), floor(mean * (1 + tolerance))))

    def first_credit(self, group: int) -> int:
        """The credit of a group before its first turn: groups get what is over one by one."""
        return group * self.schedule.prefill_requests % self.groups

    def next_credit(self, credit: int) -> int:
        return (credit + self.schedule.prefill_requests) % self.groups

    def is_near(self, steps_left: Iterable[int]) -> bool:
        """Whether a group at its turn waits, and steps meanwhile, for others that come to theirs in
        so many steps: prefills that follow at once share a bubble, which took up to 7 % of the
        tokens per second of 2 stages.
        """
        near = self.schedule.decode_steps // 2
        return any(0 < each <= near for each in steps_left)

    def newcomers(
        self, group: TurnGroup, share: int, texts: Sequence[int], replayed: int = 0
    ) -> int:
        """How many requests at the front, of `texts` tokens [at most `most`], join the group: at
        most `share`. The first `replayed` have run before a fault.
        """
        wanted = (group.credit + self.schedule.prefill_requests) // self.groups
        missing = self.least - group.requests
        if wanted < missing:
            wanted = min(missing, max(wanted + group.ended, replayed))
        if not group.requests:
            wanted = max(1, wanted)
        room = min(self.most - group.requests, share)
        wanted = min(wanted, room)
        fewest = missing if wanted >= missing else min(wanted, replayed)
        return evened(self.schedule, wanted, room, texts, fewest)


def evened(
    schedule: RequestSchedule, wanted: int, room: int, texts: Sequence[int], fewest: int = 0
) -> int:
    """About `wanted`, from `fewest` to `room`: so many prompts that the sum of their tokens is
    within the tolerance of that of `wanted` mean ones, where possible (ExeGPT section 5.2).
    """
    room = min(room, len(texts))
    count = min(wanted, room)
    if count < 1:
        return 0
    low, high = _even_tokens(schedule, wanted)
    total = sum(texts[:count])
    while total > high and count > max(1, fewest):
        count -= 1
        total -= texts[count]
    while total < low and count < room and total + texts[count] <= high:
        total += texts[count]
        count += 1
    return count


@lru_cache(maxsize=4096)
def _even_tokens(schedule: RequestSchedule, wanted: int) -> tuple[int, int]:
    """The fewest and the most tokens of even turns of so many requests."""
    tokens, tolerance = wanted * Fraction(schedule.mean_prompt_tokens), schedule.exact_tolerance
    return ceil((1 - tolerance) * tokens), floor((1 + tolerance) * tokens)


def even_parts(requests: int, most: int) -> list[int]:
    """The fewest parts of at most `most` requests, as even as possible, the larger ones first."""
    parts = -(-requests // most)
    each, more = divmod(requests, parts) if parts else (0, 0)
    return [each + (i < more) for i in range(parts)]


class TurnQueue(Protocol):
    """Requests that wait for their turns, by the memory and slots that there are for them."""

    @property
    def waiting(self) -> int: ...

    def front(self, most: int) -> tuple[Sequence[int], int]:
        """Tokens of the first prompts, at most so many, and how many of these run again."""

    def room_for(self, wanted: int) -> int:
        """For how many of the first `wanted` there is memory."""

    def take(self, count: int) -> list[int]: ...


class RraPolicy:
    """Which group goes on, and who joins it. A turn's newcomers are prefilled in as few
    micro-batches as possible; when all are back, the group makes `decode_steps` steps. Empty groups
    take a turn as soon as a request waits, sharing few; a turn that found nobody is made up for
    after any later step.
    """

    def __init__(self, schedule: RequestSchedule, most_in_group: int, most_in_part: int) -> None:
        self._most_in_group, self._most_in_part = most_in_group, most_in_part
        self._turns = Turns.of(schedule, most_in_group)
        self.groups: list[TurnGroup] = []
        self._due: deque[TurnGroup] = deque()
        self.follow(schedule)

    def follow(self, schedule: RequestSchedule) -> None:
        """Take turns by another schedule from each group's next turn; surplus groups run empty."""
        turns = self._turns = Turns.of(schedule, self._most_in_group)
        for index in range(len(self.groups), turns.groups):
            self.groups.append(TurnGroup(index, turns.first_credit(index)))
        for group in self.groups:
            group.credit %= turns.groups
            group.steps_left = min(group.steps_left, schedule.decode_steps)

    def wants(self, waiting: int) -> bool:
        """Whether a turn comes next that could take more than so many `waiting` requests."""
        empty = self._empty_groups
        takes_turn = bool(self._due) and self._due[0].is_at_turn
        return (empty > 0 or takes_turn) and waiting < self._turns.most * max(1, empty)

    def next(self, queue: TurnQueue) -> tuple[TurnGroup, list[int]] | None:
        """A group, and those of its newcomers that are prefilled next; None for now."""
        self._wake(queue.waiting)
        while self._due:
            group = self._due[0]
            if group.is_at_turn and not self._waits(group):
                self._begin_turn(group, queue)
            part = group.parts.popleft() if group.parts else []
            if not group.parts:
                self._due.popleft().is_due = False
            if not part:
                if not group.requests or group.under_way:  # newcomers that were left are cancelled
                    continue
                group.steps_left = max(0, group.steps_left - 1)
            group.under_way += 1
            return group, part
        return None

    def leave(self, group: TurnGroup, requests: int) -> None:
        group.requests -= requests
        group.ended += requests
        if not group.requests:
            group.steps_left = 0

    def take_back(self, group: TurnGroup) -> None:
        """Take back a micro-batch, once those have left who ended with it."""
        group.under_way -= 1
        if group.requests and not (group.under_way or group.parts):
            self._come_due(group)

    @property
    def _open_groups(self) -> list[TurnGroup]:
        return self.groups[: self._turns.groups]

    @property
    def _empty_groups(self) -> int:
        return sum(not group.requests for group in self._open_groups)

    def _wake(self, waiting: int) -> None:
        """Give empty groups a turn as soon as a request waits."""
        for group in self._open_groups:
            if not (group.requests or group.is_due):
                if waiting:
                    self._come_due(group)
                else:
                    group.ended = 0

    def _waits(self, group: TurnGroup) -> bool:
        return bool(group.requests) and self._turns.is_near(g.steps_left for g in self.groups)

    def _begin_turn(self, group: TurnGroup, queue: TurnQueue) -> None:
        joining = self._newcomers(group, queue) if group.index < self._turns.groups else 0
        group.ended = 0
        if not queue.waiting:
            return
        group.credit = self._turns.next_credit(group.credit)
        group.parts.extend(map(queue.take, even_parts(joining, self._most_in_part)))
        group.requests += joining
        group.steps_left = self._turns.schedule.decode_steps if group.requests else 0

    def _newcomers(self, group: TurnGroup, queue: TurnQueue) -> int:
        share = self._turns.most
        if not group.requests:
            share = -(-queue.waiting // max(1, self._empty_groups))
        texts, replayed = queue.front(self._turns.most)
        return queue.room_for(self._turns.newcomers(group, share, texts, replayed))

    def _come_due(self, group: TurnGroup) -> None:
        group.is_due = True
        self._due.append(group)


WAITING = 1
"""Micro-batches under way beside one on every stage, so that none waits for the next, and turns of
newcomers beside those. More would only wait longer, which counts as latency."""

SHORT_PROMPTS = 2
"""The requests of a micro-batch, or a turn, that short prompts may make of one that was planned: as
many tokens keep a stage as busy, and each request takes a slot and a row of logits."""


def newcomers(
    schedule: RequestSchedule, stages: int, present: int, prefilling: int
) -> tuple[int, int]:
    """How many requests should, and may, begin with the next turn; `present` are or will be in."""
    if present > schedule.decode_requests:
        return 0, 0
    room = min(
        schedule.most_in_flight - present,
        (stages + WAITING) * schedule.prefill_requests - prefilling,
        SHORT_PROMPTS * schedule.prefill_requests,
    )
    return min(schedule.prefill_requests, room), room


def free_tokens(n_slots: int, reserved: int, leaving: int, in_flight: int) -> float:
    """Token slots for newcomers where requests `in_flight` reserve so many, of which as many are
    free before a prefill is back as those `leaving` by then have in the mean.
    """
    return n_slots - reserved + (reserved * leaving / in_flight if in_flight else 0.0)


def that_fit(sizes: Iterable[int], room: float) -> int:
    """How many of the first have room together."""
    totals = accumulate(sizes)
    return sum(1 for _ in takewhile(lambda total: total <= room, totals))


@dataclass(frozen=True)
class PrefillSizes:
    """Limits of a micro-batch of prompts: up to `even_tokens` is as even as others."""

    most: int
    usual_tokens: float
    even_tokens: float
    most_tokens: float

    @classmethod
    def of(cls, schedule: RequestSchedule, longest: int, size: int | None = None) -> PrefillSizes:
        """Sizes for prompts up to `longest`, micro-batches of `size` mean ones (None: planned)."""
        size = size or schedule.prefill_micro_batch
        usual = size * schedule.mean_prompt_tokens
        even = (1 + schedule.tolerance) * usual
        return cls(SHORT_PROMPTS * size, usual, even, size * longest)

    def next_part(self, waiting: Iterable[int], waiting_tokens: float) -> int:
        """How many of `waiting` make the next micro-batch: about the usual tokens, or halves."""
        wanted = self.usual_tokens
        if waiting_tokens < 2 * wanted:
            is_even = waiting_tokens <= self.even_tokens
            wanted = waiting_tokens if is_even else waiting_tokens / 2
        taken = total = 0
        for text in islice(waiting, self.most):
            if taken and (total + text / 2 > wanted or total + text > self.most_tokens):
                break
            total += text
            taken += 1
        return taken


def joining(size: int, requests: int, groups: int, most_in_group: int) -> int:
    """How many join a group of `size`, so that all `requests` are in even groups, or full ones."""
    return max(0, min(-(-requests // groups), most_in_group) - size)
