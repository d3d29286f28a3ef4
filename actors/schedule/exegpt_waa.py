"""The policy `exegpt` where some stages prefill and others decode (WAA, ExeGPT section 4.1).

Names of the paper and here: B_E is `prefill_requests` of the schedule, of which the driver gives
turns of as many; B_D is `decode_requests` and B_m `decode_micro_batches`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from actors.messages import (
    Admission,
    Finished,
    MicroBatch,
    Move,
    Park,
    Request,
    Sampled,
    TokenIds,
    TokenRange,
)
from actors.schedule.request_slots import RequestSlots, SlotRequests, computed_parts, most_tokens
from actors.schedule.scheduler import QueueScheduler, QueueSizes, Scheduler, most_in_slots
from planner.plan.kv_copies import host_tokens
from planner.plan.spec import PlanSpec
from planner.schedule.turns import SHORT_PROMPTS, WAITING, PrefillSizes, joining
from planner.scheduling import PolicyOptions, RequestSchedule
from quant.common.errors import SpecError


class PrefillScheduler(QueueScheduler):
    """A scheduler of requests for one token each, first come, first served.

    Prompts follow each other in micro-batches of about as many tokens as the schedule's
    `prefill_micro_batch` of the mean length have; where the queue has less than two of these,
    halves of it. A request is done with one pass, and what other stages need of it is kept in host
    memory. So the next micro-batch has the whole KV cache again, as every stage takes them in their
    order.
    """

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        if min(sizes.slots, sizes.prefill_micro_batch) < 1 or sizes.kv_tokens < sizes.slot_tokens:
            raise SpecError(
                f"{sizes.slots} slots, prefills of {sizes.prefill_micro_batch} and "
                f"{sizes.kv_tokens} token slots for prompts of up to {sizes.slot_tokens}; give at "
                "least 1 of each, and room for the longest prompt"
            )
        super().__init__(SlotRequests(sizes.slots))
        self._sizes = sizes
        self._stages = stages
        self._free = deque(range(sizes.slots))
        self.follow(sizes.followed_schedule)

    def follow(self, schedule: RequestSchedule) -> None:
        """Make micro-batches by this schedule from now on, of the most requests that there are."""
        self._size = min(self._sizes.prefill_micro_batch, schedule.prefill_micro_batch)
        parts = PrefillSizes.of(schedule, self._sizes.slot_tokens, self._size)
        self._parts = replace(parts, most_tokens=min(self._sizes.kv_tokens, parts.most_tokens))

    @property
    def most_under_way(self) -> int:
        return self._stages + WAITING

    @property
    def wants_requests(self) -> bool:
        """Whether the queue has less than a micro-batch."""
        return len(self._waiting) < self._size

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """Prefill the requests that came first, from the beginning of the KV cache on."""
        requests = [self._waiting.popleft() for _ in range(self._newcomers())]
        if not requests:
            return None
        slots = [self._free.popleft() for _ in requests]
        texts = list(map(self._slots.put, slots, requests))
        starts, counts, token_ids = computed_parts(requests, texts)
        sizes = starts + counts
        begins = sizes.cumsum() - sizes
        rows = list(zip(slots, requests, begins.tolist(), sizes.tolist(), strict=True))
        batch = MicroBatch(
            np.array(slots, dtype=np.int64),
            starts,
            counts,
            begins,
            tuple(Admission.of(slot, r, TokenRange(at, size)) for slot, r, at, size in rows),
            sizes=sizes,
            keeps=tuple(
                Park(r.host_key.number, at, size)
                for _, r, at, size in rows
                if r.host_key is not None and size <= self._sizes.parked_tokens
            ),
        )
        return batch, token_ids

    def _newcomers(self) -> int:
        texts = [len(r.prompt_ids) + len(r.generated) for r in self._waiting]
        return self._parts.next_part(texts[: len(self._free)], sum(texts))

    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        finished = self._slots.complete(batch, sampled)
        slots = batch.slots.tolist()
        assert self.requests.keys().isdisjoint(slots), "each is for one token"
        self._free.extend(slots)
        return finished


def prefill_sizes(plan: PlanSpec, options: PolicyOptions) -> QueueSizes:
    """The sizes for stages of `plan` that prefill by the schedule of those that decode."""
    size, workload = plan.micro_batches.prefill, plan.workload
    return QueueSizes(
        slots=most_in_slots(plan, SHORT_PROMPTS * size * (len(plan.stages) + WAITING)),
        prefill_micro_batch=size,
        decode_micro_batch=(SHORT_PROMPTS - 1) * size,
        slot_tokens=workload.total_length,
        policy="exegpt",
        kv_tokens=workload.kv_tokens,
        parked_tokens=host_tokens(plan),
        schedule=options.followed_schedule,
        role="prefill",
    )


@dataclass(eq=False)
class _Group:
    """The slots of the requests that decode together; others may join where it `is_open`."""

    slots: list[int] = field(default_factory=list)
    is_open: bool = True


class DecodeScheduler(Scheduler):
    """A scheduler whose requests are divided into groups, each of which makes one decode step per
    round.

    A request whose keys and values have come to host memory, by its `host_key`, joins a group
    between two of its steps, and is restored with the next one; others are prefilled first, in
    micro-batches that take turns with the steps. Groups are kept even. Requests reserve token slots
    for their prompt and all of their new tokens, and of either kind nobody is overtaken.
    """

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        if min(sizes.slots, sizes.prefill_micro_batch, sizes.decode_micro_batch) < 1:
            raise SpecError(
                f"{sizes.slots} slots, prefills of {sizes.prefill_micro_batch} and steps of "
                f"{sizes.decode_micro_batch} requests; the policy {sizes.policy} needs at least 1"
            )
        self._sizes = sizes
        n_slots = sizes.n_slots or sizes.kv_tokens
        self._slots: RequestSlots = RequestSlots(sizes.slots, sizes.kv_tokens, n_slots)
        self._groups: list[_Group] = []
        self._resting = deque[_Group]()  # without a step under way
        self._under_way: deque[_Group | None] = deque()  # of each step; None: a prefill
        self._arrived: deque[Request] = deque()
        self._bare: deque[Request] = deque()  # without keys and values
        self._drops: list[int] = []  # of the next micro-batch
        self._joined = 0
        self._steps_next = False
        self.follow(sizes.followed_schedule)

    def follow(self, schedule: RequestSchedule) -> None:
        """Decode by this schedule from now on, with the slots and in steps of the most requests
        that there are.

        Groups that are too many for it take nobody any more, and make steps until they are empty.
        """
        self._most = min(self._sizes.slots, schedule.most_in_flight)
        even = -(-self._most // schedule.decode_micro_batches)
        self._most_in_group = min(self._sizes.decode_micro_batch, even)
        count = -(-self._most // self._most_in_group)
        more = [_Group() for _ in range(len(self._groups), count)]
        self._groups += more
        self._resting += more
        for number, group in enumerate(self._groups):
            group.is_open = number < count

    def add(self, requests: Sequence[Request]) -> None:
        self._slots.expect(requests)
        for request in requests:
            # With a key, those of all its tokens but the last one lie in host memory.
            has_arrived = request.host_key is not None and request.generated
            (self._arrived if has_arrived else self._bare).append(request)

    def cancel(self, custom_id: str) -> None:
        for request in self._arrived:
            if request.custom_id == custom_id and request.host_key is not None:
                self._drops.append(request.host_key.number)
        self._arrived = deque(r for r in self._arrived if r.custom_id != custom_id)
        self._bare = deque(r for r in self._bare if r.custom_id != custom_id)
        self._slots.cancel(custom_id)
        self._let_go()

    @property
    def most_under_way(self) -> int:
        """Most micro-batches that may be under way: a step of each group, and a prefill."""
        return sum(group.is_open or bool(group.slots) for group in self._groups) + 1

    @property
    def waiting(self) -> int:
        return len(self._arrived) + len(self._bare)

    @property
    def wants_requests(self) -> bool:
        """Whether a request could join that is not there yet."""
        return not self.waiting and self.in_slots < self._most

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """The next prefill or step, by turns where there are both."""
        found = (self._step() or self._prefill()) if self._steps_next else None
        found = found or self._prefill() or self._step()
        if found is None:
            return None
        self._steps_next = self._under_way[-1] is None
        batch, token_ids = found
        drops, self._drops = tuple(self._drops), []
        return replace(batch, drops=drops), token_ids

    def _step(self) -> tuple[MicroBatch, TokenIds] | None:
        """The next step of the group that has been back for longest and has requests."""
        for _ in range(len(self._resting)):
            group = self._resting.popleft()
            new, moves = self._join(group)
            ready = [slot for slot in group.slots if self._slots.ready[slot]]
            if not ready:
                self._resting.append(group)
                continue
            self._under_way.append(group)
            batch, token_ids = self._slots.batch(np.array(ready, dtype=np.int64), new, moves)
            restores = tuple(self._restore(slot) for slot in new)
            return replace(batch, restores=restores), token_ids
        return None

    def _join(self, group: _Group) -> tuple[list[int], tuple[Move, ...]]:
        """Let requests join whose keys and values are there; returns their slots, and moves."""
        most = self._joining(group) if group.is_open else 0
        slots, moves = self._take(self._arrived, most, group)
        for slot in slots:  # after all reservations: what is restored later does not move
            request = self.requests[slot]
            self._slots.written[slot] = len(request.prompt_ids) + len(request.generated) - 1
        return slots, moves

    @property
    def _open_groups(self) -> list[_Group]:
        """Those that requests may join: a schedule before may have had more."""
        return [group for group in self._groups if group.is_open]

    def _joining(self, group: _Group) -> int:
        """How many may join a group, so that all that have come are in even ones."""
        groups = self._open_groups
        requests = sum(len(each.slots) for each in groups) + len(self._arrived)
        return joining(len(group.slots), requests, len(groups), self._most_in_group)

    def _restore(self, slot: int) -> Park:
        key = self.requests[slot].host_key
        assert key is not None, "only those join that have one"
        begin = int(self._slots.ranges.begins[slot])
        return Park(key.number, begin, int(self._slots.written[slot]) - 1)

    def _prefill(self) -> tuple[MicroBatch, TokenIds] | None:
        """The prefill of the requests that are next, into the smallest groups."""
        slots, moves = self._take(self._bare, self._sizes.prefill_micro_batch)
        if not slots:
            return None
        self._under_way.append(None)
        return self._slots.batch(np.array(slots, dtype=np.int64), slots, moves)

    def _fits(self, request: Request) -> bool:
        return self.in_slots < self._most and most_tokens(request) <= self._slots.available

    def _take(
        self, queue: deque[Request], most: int, group: _Group | None = None
    ) -> tuple[list[int], tuple[Move, ...]]:
        """Give slots to the first of `queue` in `group` (None: the smallest); slots and moves."""
        slots: list[int] = []
        moves: tuple[Move, ...] = ()
        while queue and len(slots) < most and self._fits(queue[0]):
            request = queue.popleft()
            slot, more = self._slots.take(request, self._joined, most_tokens(request))
            self._joined += 1
            joined = group or min(self._open_groups, key=lambda each: len(each.slots))
            joined.slots.append(slot)
            slots.append(slot)
            moves += more
        return slots, moves

    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        finished = self._slots.complete(batch, sampled)
        group = self._under_way.popleft()
        if group is not None:
            self._resting.append(group)
        self._let_go()
        return finished

    def _let_go(self) -> None:
        """Forget the requests that have left their slots."""
        for group in self._groups:
            group.slots = [slot for slot in group.slots if slot in self.requests]


def decode_sizes(plan: PlanSpec, options: PolicyOptions) -> QueueSizes:
    """The sizes for stages of `plan` that decode by a schedule that divides the phases: those that
    the plan has memory for, and at least what the schedule's tolerance allows, in its groups.
    """
    schedule, workload, planned = options.followed_schedule, plan.workload, plan.micro_batches
    most = schedule.most_in_flight
    return QueueSizes(
        slots=most_in_slots(plan, max(most, workload.global_batch)),
        prefill_micro_batch=min(most, planned.prefill),
        decode_micro_batch=max(planned.decode, -(-most // schedule.decode_micro_batches)),
        slot_tokens=workload.total_length,
        policy="exegpt",
        kv_tokens=workload.kv_tokens,
        n_slots=workload.reservable_tokens,
        parked_tokens=host_tokens(plan),
        schedule=schedule,
        role="decode",
    )
