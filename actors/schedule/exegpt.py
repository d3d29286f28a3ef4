"""The policy `exegpt` with a schedule `rra`: turns of newcomers and decode steps (ExeGPT, sections
4.1 and 5.2).

Names of the paper and here: B_E is `prefill_requests`, N_D `decode_steps`, and B_D
`decode_requests` of the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice, takewhile

import numpy as np

from actors.messages import Finished, MicroBatch, Move, Sampled, TokenIds
from actors.schedule.request_slots import RequestSlots, most_tokens, text_tokens
from actors.schedule.scheduler import QueueScheduler, QueueSizes, check_reservable, most_in_slots
from planner.plan.spec import PlanSpec
from planner.schedule.passes import TurnSizes
from planner.schedule.static import UNDER_WAY_PER_STAGE
from planner.schedule.turns import RraPolicy, TurnGroup
from planner.scheduling import PolicyOptions, RequestSchedule
from quant.common.errors import SpecError


class RraScheduler(QueueScheduler):
    """A scheduler whose requests are divided into groups, each of which alternates by itself.

    `RraPolicy` decides what comes next; here are the requests and their tokens. Who ends leaves at
    once. Requests reserve token slots for their prompt and all of their new tokens, in the order of
    their arrival; where there are too few, a turn is smaller. The order depends neither on time,
    where all requests are there, nor on the chunks in which they are added.
    """

    _slots: RequestSlots

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        schedule = _checked(sizes)
        n_slots = sizes.n_slots or sizes.kv_tokens
        super().__init__(RequestSlots(sizes.slots, sizes.kv_tokens, n_slots))
        self._stages = stages
        self._policy = RraPolicy(schedule, sizes.decode_micro_batch, sizes.prefill_micro_batch)
        self._slots_of: dict[TurnGroup, list[int]] = {}
        self._joining: list[int] = []  # slots of newcomers, in the turn that begins
        self._moves: tuple[Move, ...] = ()  # that their reservations take
        self._arrivals = 0

    def cancel(self, custom_id: str) -> None:
        super().cancel(custom_id)
        for group in self._policy.groups:
            self._let_go(group)

    def follow(self, schedule: RequestSchedule) -> None:
        self._policy.follow(schedule)

    @property
    def most_under_way(self) -> int:
        return UNDER_WAY_PER_STAGE * self._stages

    @property
    def wants_requests(self) -> bool:
        """Whether a turn comes next that could take more requests than the queue has."""
        return self._policy.wants(len(self._waiting))

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        following = self._policy.next(self)
        if following is None:
            return None
        group, new = following
        own = self._slots_of.setdefault(group, [])
        own += self._joining
        moves, self._joining, self._moves = self._moves, [], ()
        return self._slots.batch(np.array(new or own, dtype=np.int64), new, moves)

    def front(self, most: int) -> tuple[Sequence[int], int]:
        first = list(islice(self._waiting, most))
        replayed = sum(1 for _ in takewhile(lambda request: request.generated, first))
        return [text_tokens(each) for each in first], replayed

    def room_for(self, wanted: int) -> int:
        first = islice(self._waiting, min(wanted, self._slots.free))
        reserved = np.cumsum([most_tokens(request) for request in first])
        return int(np.searchsorted(reserved, self._slots.available, "right"))

    def take(self, count: int) -> list[int]:
        slots = []
        for _ in range(count):
            request = self._waiting.popleft()
            slot, moves = self._slots.take(request, self._arrivals, most_tokens(request))
            self._moves += moves
            self._arrivals += 1
            slots.append(slot)
        self._joining += slots
        return slots

    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        slot = int(batch.slots[0])
        group = next(group for group, slots in self._slots_of.items() if slot in slots)
        finished = self._slots.complete(batch, sampled)
        self._let_go(group)
        self._policy.take_back(group)
        return finished

    def _let_go(self, group: TurnGroup) -> None:
        """Forget the requests that have left their slots."""
        slots = self._slots_of.get(group, [])
        left = [slot for slot in slots if slot in self.requests]
        self._slots_of[group] = left
        parts = [[slot for slot in part if slot in self.requests] for part in group.parts]
        group.parts = deque(part for part in parts if part)
        self._policy.leave(group, len(slots) - len(left))


def _checked(sizes: QueueSizes) -> RequestSchedule:
    """The schedule of `sizes`; SpecError where there is none, or none that runs here."""
    schedule = sizes.schedule
    if schedule is None or schedule.divides:
        kind = "none" if schedule is None else schedule.kind
        raise SpecError(f"the schedule is {kind}; stages that prefill and decode in turns need rra")
    names = ("kv_tokens", "slots", "prefill_micro_batch", "decode_micro_batch")
    check_reservable(sizes, dict.fromkeys(names, 1))
    return schedule


def exegpt_sizes(plan: PlanSpec, options: PolicyOptions) -> QueueSizes:
    """The sizes for the KV cache of `plan` under its schedule; SpecError where it has none."""
    sizes = TurnSizes.of(options.followed_schedule, plan.workload.reservable_tokens)
    return QueueSizes(
        slots=most_in_slots(plan, sizes.slots),
        prefill_micro_batch=sizes.prefill_micro_batch,
        decode_micro_batch=sizes.decode_micro_batch,
        slot_tokens=plan.workload.total_length,
        policy="exegpt",
        kv_tokens=plan.workload.kv_tokens,
        n_slots=sizes.n_slots,
        schedule=sizes.schedule,
    )
