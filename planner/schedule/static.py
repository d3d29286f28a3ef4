"""The policy `static`: decisions over the planned KV slots, and what they make of a whole job. The
first requests fill all slots; a group of decode slots steps when all of its requests have their
first token, and again when its step came back (LLM-PQ section 4.3). Newcomers take the slots of
those that ended: prefills and decode steps take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from planner.schedule.passes import JobRows, Pass, prefill_pass, rounded_mean
from planner.scheduling import Phase
from planner.workload import MicroBatches

UNDER_WAY_PER_STAGE = 2
"""Micro-batches of the policy that may be under way, per stage: enough to hide the hops."""

REFILL_SHARE = 4
"""In a pipeline newcomers are prefilled once a quarter of the slots is free, until no slot is.

A prefill keeps the decode steps behind it waiting and leaves a bubble, which prefills that follow
at once share; waiting for more free slots would leave decode steps emptier. Of shares from 1/32 to
1, 1/4 lost least in simulations of random lengths with 2 to 4 stages and prefills as long as 6 to
20 steps."""


@dataclass(slots=True, eq=False)
class SlotGroup:
    """Slots `first` to `end`, which decode together; one that `fills` waits for all newcomers."""

    index: int
    first: int
    end: int
    free: int = field(init=False)
    prefilling: int = 0
    decoding: int = 0
    under_way: bool = False
    fills: bool = True
    is_ready: bool = False

    def __post_init__(self) -> None:
        self.free = self.end - self.first


class StaticPolicy:
    """The decisions over `slots` KV slots, by who ends when, never by time."""

    def __init__(self, slots: int, sizes: MicroBatches, stages: int) -> None:
        self.most_under_way = UNDER_WAY_PER_STAGE * stages
        self.refills = True  # newcomers are prefilled, until no slot is free
        self._prefill_size = sizes.prefill
        share = max(1, slots // REFILL_SHARE)
        self._refill_from = share if stages > 1 else min(share, sizes.prefill)
        self._free = deque(range(slots))
        self._unused = slots  # free slots, in front of the others, that no request has had yet
        self._groups = [
            SlotGroup(index, first, min(first + sizes.decode, slots))
            for index, first in enumerate(range(0, slots, sizes.decode))
        ]
        self._empty_groups = len(self._groups)
        self.group_of = [group for group in self._groups for _ in range(group.first, group.end)]
        self._ready: deque[SlotGroup] = deque()
        self._decode_is_next = False

    def wants(self, waiting: int) -> bool:
        """Whether slots could be filled, had the queue more than so many `waiting` requests."""
        free = self._unused or len(self._free)
        if waiting >= min(self._prefill_size, free):
            return False
        return self.refills or self._empty_groups > 0

    def next(self, waiting: int) -> list[int] | SlotGroup | None:
        """The slots of the next prefill, or a group that steps; None where there is none now. The
        first requests fill all slots, then prefills and decode steps take turns.
        """
        size = self._largest_prefill(waiting) if self.refills else 0
        group = None
        for each in self._ready:
            if not (each.fills and (each.prefilling or (each.free and size))):
                group = each
                break
        # fewer micro-batches than groups go round where one is empty: a stage may then be idle
        if group is None and not size and self._empty_groups:
            size = self._largest_prefill(waiting)
        if size and (self._unused or group is None or not self._decode_is_next):
            self._decode_is_next = True
            return self._prefill(size)
        if group is None:
            return None
        return self._step(group)

    def _step(self, group: SlotGroup) -> SlotGroup:
        self._decode_is_next = False
        self._ready.remove(group)
        group.is_ready, group.under_way, group.fills = False, True, False
        return group

    def _largest_prefill(self, waiting: int) -> int:
        return min(self._prefill_size, self._unused or len(self._free), waiting)

    def _prefill(self, size: int) -> list[int]:
        slots = sorted(self._free.popleft() for _ in range(size))
        self._unused = max(0, self._unused - size)
        self.refills &= bool(self._free)
        for slot in slots:
            group = self.group_of[slot]
            self._empty_groups -= group.free == group.end - group.first
            group.free -= 1
            group.prefilling += 1
        return slots

    def prefilled(self, slots: Sequence[int]) -> list[SlotGroup]:
        """Let requests decode whose first token is back; returns their groups in slot order."""
        touched: list[SlotGroup] = []
        for slot in slots:
            group = self.group_of[slot]
            if not touched or touched[-1] is not group:
                touched.append(group)
            group.prefilling -= 1
            group.decoding += 1
        return touched

    def stepped(self, slot: int) -> list[SlotGroup]:
        """Take back the group of `slot`, whose step is back; returns it alone."""
        group = self.group_of[slot]
        group.under_way = False
        return [group]

    def leave(self, slot: int) -> None:
        group = self.group_of[slot]
        group.decoding -= 1
        group.free += 1
        self._empty_groups += group.free == group.end - group.first
        self._free.append(slot)
        self.refills |= len(self._free) >= self._refill_from

    def settle(self, touched: Sequence[SlotGroup]) -> None:
        """Make groups ready to step, once all who ended with the micro-batch have left."""
        for group in touched:
            if not group.decoding:
                group.fills = True
            elif not group.under_way and not group.is_ready:
                group.is_ready = True
                self._ready.append(group)


@dataclass(slots=True)
class _GroupCount:
    """Steps so far, tokens before the next one, and by ending step (slot, context after)."""

    step: int = 0
    context_tokens: int = 0
    ends: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


class JobSchedule:
    """The order of passes of `rows`, each of which runs all of its output tokens. Requests cost
    something when they come and leave only, so that a pass takes a few microseconds.
    """

    def __init__(self, rows: JobRows, slots: int, sizes: MicroBatches, stages: int) -> None:
        self.policy = StaticPolicy(slots, sizes, stages)
        self.prefilled = 0
        """The requests whose prefill has been submitted."""
        self.ended_after: list[int] = []
        """After how many results each request had ended, in the order in which they did."""
        self._prompts, self._outputs = list(rows.prompts), list(rows.outputs)
        self._mixed = len(set(self._prompts)) > 1
        self._counts = [_GroupCount() for _ in range(0, slots, sizes.decode)]
        self._results = 0

    def phases(self) -> Iterator[Phase]:
        """The phase of every pass, for those who count passes only."""
        for each in self._submitted():
            yield "decode" if isinstance(each, SlotGroup) else "prefill"

    def passes(self) -> Iterator[Pass]:
        """Every pass, in the first stage's order of computing."""
        prefills = 0
        for each in self._submitted():
            if isinstance(each, SlotGroup):
                count, requests = self._counts[each.index], each.decoding
                context = rounded_mean(count.context_tokens - requests, requests)
                yield Pass("decode", each.index, count.step, requests, 1, context, self._results)
            else:
                new = range(self.prefilled - len(each), self.prefilled)
                yield prefill_pass(self._prompts, new, prefills, self._results, self._mixed)
                prefills += 1

    def _submitted(self) -> Iterator[list[int] | SlotGroup]:
        rows, next_of, most = len(self._outputs), self.policy.next, self.policy.most_under_way
        under_way: deque[tuple[list[int] | SlotGroup, int]] = deque()
        while True:
            first = self.prefilled
            following = next_of(rows - first) if len(under_way) < most else None
            if following is not None:
                under_way.append((following, first))
                if isinstance(following, SlotGroup):
                    count = self._counts[following.index]
                    count.step += 1
                    count.context_tokens += following.decoding
                else:
                    self.prefilled += len(following)
                yield following
            elif under_way:
                self._complete(*under_way.popleft())
            else:
                return

    def _complete(self, done: list[int] | SlotGroup, first_request: int) -> None:
        self._results += 1
        if isinstance(done, SlotGroup):
            touched = self.policy.stepped(done.first)
            count = self._counts[done.index]
            if count.step in count.ends:
                for slot, context in sorted(count.ends.pop(count.step)):
                    count.context_tokens -= context
                    self._leave(slot)
        else:
            touched = self.policy.prefilled(done)
            for request, slot in enumerate(done, start=first_request):
                self._begin(request, slot)
        self.policy.settle(touched)

    def _begin(self, request: int, slot: int) -> None:
        prompt, steps = self._prompts[request], self._outputs[request] - 1
        if not steps:
            self._leave(slot)
            return
        count = self._counts[self.policy.group_of[slot].index]
        count.context_tokens += prompt
        count.ends.setdefault(count.step + steps, []).append((slot, prompt + steps))

    def _leave(self, slot: int) -> None:
        self.policy.leave(slot)
        self.ended_after.append(self._results)
