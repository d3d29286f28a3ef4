"""The policy `exegpt` with a schedule `rra`: turns of newcomers and decode steps (ExeGPT, sections
4.1 and 5.2).

Names of the paper and here: B_E is `prefill_requests`, N_D `decode_steps`, and B_D
`decode_requests` of the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

import numpy as np

from actors.messages import Finished, MicroBatch, Move, Request, Sampled, TokenIds
from actors.schedule.request_slots import RequestSlots, most_tokens
from actors.schedule.scheduler import QueueSizes, check_reservable
from actors.stage_figures import NO_SUPERVISION, Supervision
from planner.plan.spec import PlanSpec
from planner.schedule.policy_sizes import TurnSizes
from planner.schedule.static import UNDER_WAY_PER_STAGE
from planner.schedule.turns import GroupTurn, Turns, even_parts
from planner.scheduling import PolicyOptions, RequestSchedule
from quant.common.errors import SpecError


@dataclass(eq=False)
class _Group:
    """A group: the slots of its requests, those `parts` of newcomers whose prefills are still to be
    submitted, its micro-batches under way, and its steps before the next turn.

    `credit` is as in `planner.schedule.turns`; `ended` counts requests since the last turn.
    """

    credit: int
    slots: list[int] = field(default_factory=list)
    parts: deque[list[int]] = field(default_factory=deque)
    under_way: int = 0
    steps_left: int = 0
    ended: int = 0
    is_due: bool = False

    @property
    def is_at_turn(self) -> bool:
        """Whether newcomers may join when it is due next."""
        return not (self.parts or self.under_way or self.steps_left)


class RraScheduler:
    """A scheduler whose requests are divided into groups, each of which alternates by itself.

    A group takes a turn of newcomers (`planner.schedule.turns`), whose prompts are prefilled in as
    few micro-batches as possible; when all are back, its requests make `decode_steps` steps, each
    as soon as the one before is back. Who ends leaves at once. Micro-batches are submitted in the
    order in which their group got ready, so that prefills of one group and steps of others overlap.
    Groups that come to their turns at nearly the same time take them one after the other.

    Nobody waits for a turn to fill: a group without requests takes its turn as soon as one waits,
    of those it shares few with the other groups, and a turn that found nobody waiting is made up
    for after any later step. Requests reserve token slots for their prompt and all of their new
    tokens, in the order of their arrival; where there are too few, a turn is smaller. The order
    depends neither on time, where all requests are there, nor on the chunks in which they are
    added.
    """

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        self._schedule = _checked(sizes)
        self._sizes = sizes
        self._stages = stages
        n_slots = sizes.n_slots or sizes.kv_tokens
        self._slots = RequestSlots(sizes.slots, sizes.kv_tokens, n_slots)
        self._turns = Turns.of(self._schedule, sizes.decode_micro_batch)
        self._groups = [_Group(self._turns.first_credit(i)) for i in range(self._turns.groups)]
        self._due: deque[_Group] = deque()
        self._waiting: deque[Request] = deque()
        self._arrivals = 0
        self._closed = False

    def add(self, requests: Sequence[Request], last: bool) -> None:
        """Put `requests` at the end of the queue; after the `last` ones no more come.

        Raises SpecError for a request with more tokens than all may reserve together.
        """
        self._slots.expect(requests)
        self._waiting.extend(requests)
        self._closed = last

    def cancel(self, custom_id: str) -> None:
        """Give up a request: it leaves the queue or its slot now, or when its micro-batch is back.

        Nothing is told of it any more.
        """
        self._waiting = deque(r for r in self._waiting if r.custom_id != custom_id)
        self._slots.cancel(custom_id)
        for group in self._groups:
            self._let_go(group)

    def follow(self, schedule: RequestSchedule) -> None:
        """Take turns by another schedule from now on: each group from its next turn on.

        Groups that are too many for it take nobody any more; prefills are as large as before.
        """
        self._schedule = schedule
        self._turns = Turns.of(schedule, self._sizes.decode_micro_batch)
        missing = range(len(self._groups), self._turns.groups)
        self._groups += [_Group(self._turns.first_credit(number)) for number in missing]
        for group in self._groups:
            group.credit %= self._turns.groups
            group.steps_left = min(group.steps_left, schedule.decode_steps)

    @property
    def most_under_way(self) -> int:
        """Most micro-batches that may be under way at a time: enough to hide the hops."""
        return UNDER_WAY_PER_STAGE * self._stages

    @property
    def waiting(self) -> int:
        """Number of requests without a reservation."""
        return len(self._waiting)

    @property
    def in_slots(self) -> int:
        """Number of requests that have one."""
        return len(self._slots.requests)

    @property
    def supervision(self) -> Supervision:
        """Nothing: every reservation has room for the longest answer."""
        return NO_SUPERVISION

    def slot_tokens(self) -> dict[int, tuple[str, TokenIds]]:
        """Return, by slot, the `custom_id` of its request and the new tokens; none of cancelled
        requests.
        """
        return self._slots.tokens()

    @property
    def wants_requests(self) -> bool:
        """Whether a turn comes next that could take more requests than the queue has."""
        if self._closed:
            return False
        empty = self._empty_groups
        takes_turn = bool(self._due) and self._due[0].is_at_turn
        return (empty > 0 or takes_turn) and len(self._waiting) < self._turns.most * max(1, empty)

    @property
    def _open_groups(self) -> list[_Group]:
        """Those that newcomers may join: a schedule before may have had more."""
        return self._groups[: self._turns.groups]

    @property
    def _empty_groups(self) -> int:
        return sum(not group.slots for group in self._open_groups)

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """The next prefill or step of the group that has been ready for longest."""
        self._wake()
        while self._due:
            group = self._due[0]
            moves: tuple[Move, ...] = ()
            if group.is_at_turn and not self._waits(group):
                moves = self._begin_turn(group)
            if group.parts:
                return self._prefill(group, moves)
            self._leave_due()
            if group.slots and not group.under_way:  # else newcomers that were left are cancelled
                return self._step(group)
        return None

    def _wake(self) -> None:
        """Give empty groups a turn as soon as a request waits."""
        for group in self._open_groups:
            if not group.slots and not group.is_due:
                if self._waiting:
                    self._come_due(group)
                else:
                    group.ended = 0

    def _waits(self, group: _Group) -> bool:
        """Whether another group comes to its turn soon, and this one goes on until then."""
        steps = (each.steps_left for each in self._groups)
        return bool(group.slots) and self._turns.is_near(steps)

    def _begin_turn(self, group: _Group) -> tuple[Move, ...]:
        """Let newcomers join, where some wait; returns the moves that their reservations take."""
        joining = self._newcomers(group) if group in self._open_groups else 0
        group.ended = 0
        if not self._waiting:
            return ()
        group.credit = self._turns.next_credit(group.credit)
        moves: tuple[Move, ...] = ()
        for part in even_parts(joining, self._sizes.prefill_micro_batch):
            group.parts.append([])
            for _ in range(part):
                request = self._waiting.popleft()
                slot = self._slots.take(request, self._arrivals)
                moves += self._slots.reserve(slot, most_tokens(request))
                self._arrivals += 1
                group.parts[-1].append(slot)
                group.slots.append(slot)
        group.steps_left = self._schedule.decode_steps if group.slots else 0
        return moves

    def _newcomers(self, group: _Group) -> int:
        """How many requests join the group, for all of whom there is memory."""
        share = self._turns.most
        if not group.slots:
            share = -(-len(self._waiting) // max(1, self._empty_groups))
        first = list(islice(self._waiting, self._turns.most))
        replayed = sum(1 for _ in takewhile(lambda request: request.generated, first))
        turn = GroupTurn(len(group.slots), group.ended, group.credit, share, replayed)
        texts = [len(request.prompt_ids) + len(request.generated) for request in first]
        wanted = min(self._turns.newcomers(turn, texts), self._slots.free)
        reserved = np.cumsum([most_tokens(request) for request in first[:wanted]])
        return int(np.searchsorted(reserved, self._slots.available, "right"))

    def _prefill(self, group: _Group, moves: tuple[Move, ...]) -> tuple[MicroBatch, TokenIds]:
        slots = group.parts.popleft()
        if not group.parts:
            self._leave_due()
        group.under_way += 1
        return self._slots.batch(np.array(slots, dtype=np.int64), slots, moves)

    def _step(self, group: _Group) -> tuple[MicroBatch, TokenIds]:
        group.steps_left = max(0, group.steps_left - 1)
        group.under_way += 1
        return self._slots.batch(np.array(group.slots, dtype=np.int64), (), ())

    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        """Take in the tokens of `batch`; returns the requests that ended with it."""
        slot = int(batch.slots[0])
        group = next(group for group in self._groups if slot in group.slots)
        finished = self._slots.complete(batch, sampled)
        group.under_way -= 1
        self._let_go(group)
        if group.slots and not group.under_way and not group.parts:
            self._come_due(group)
        return finished

    def _let_go(self, group: _Group) -> None:
        """Forget the requests that have left their slots."""
        left = [slot for slot in group.slots if slot in self._slots.requests]
        group.ended += len(group.slots) - len(left)
        group.slots = left
        parts = [[slot for slot in part if slot in self._slots.requests] for part in group.parts]
        group.parts = deque(part for part in parts if part)
        if not left:
            group.steps_left = 0

    def _come_due(self, group: _Group) -> None:
        group.is_due = True
        self._due.append(group)

    def _leave_due(self) -> None:
        self._due.popleft().is_due = False


def _checked(sizes: QueueSizes) -> RequestSchedule:
    """The schedule of `sizes`; SpecError where there is none, or one that stages here cannot run,
    and for sizes below 1.
    """
    schedule = sizes.schedule
    if schedule is None or schedule.divides:
        kind = "none" if schedule is None else schedule.kind
        raise SpecError(f"the schedule is {kind}; stages that prefill and decode in turns need rra")
    for name in ("kv_tokens", "slots", "prefill_micro_batch", "decode_micro_batch"):
        value = getattr(sizes, name)
        if value < 1:
            raise SpecError(f"{name} is {value}; the policy {sizes.policy} needs at least 1")
    check_reservable(sizes)
    return schedule


def exegpt_sizes(plan: PlanSpec, options: PolicyOptions) -> QueueSizes:
    """The sizes for the KV cache of `plan` under its schedule; SpecError where it has none."""
    sizes = TurnSizes.of(options.followed_schedule, plan.workload.reservable_tokens)
    return QueueSizes(
        slots=sizes.slots,
        prefill_micro_batch=sizes.prefill_micro_batch,
        decode_micro_batch=sizes.decode_micro_batch,
        slot_tokens=plan.workload.total_length,
        policy="exegpt",
        kv_tokens=plan.workload.kv_tokens,
        n_slots=sizes.n_slots,
        schedule=sizes.schedule,
    )
