"""The policy `orca`: iteration-level first-come-first-served scheduling (ORCA, Algorithm 1).

Symbols of the paper and their names here: n_workers is `most_under_way`, max_bs is
`max_batch_size`, n_slots is `RequestSlots.n_slots`, n_rsrv is `TokenRanges.reserved`, max_tokens of
a request is `most_tokens`. Of the request pool, requests in state INITIATION are `_waiting`, those
in state INCREMENT are `RequestSlots.ready`, and those in state RUNNING have a slot and are not
ready. Lines 17 to 28 are
`next_batch`, of which 23 to 26 are `_admit`, lines 11 to 14 `complete`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from actors.messages import Move, Request
from actors.schedule.request_slots import most_tokens
from actors.schedule.scheduler import QueueSizes
from actors.schedule.token_slots import TokenSlotScheduler, token_slot_sizes
from planner.plan.spec import PlanSpec
from planner.scheduling import PolicyOptions


class OrcaScheduler(TokenSlotScheduler):
    """A scheduler that selects, for every iteration anew, the requests that came first.

    A micro-batch has up to `max_batch_size` requests in the order of their arrival, some with their
    whole prompt (initiation phase) and some with one token (increment phase). When a request is
    selected first, it reserves token slots for its prompt and all of its new tokens; where there
    are too few, selection stops there, so that no later request overtakes it. The order depends
    neither on time, where all requests are there, nor on the chunks in which they are added.

    Beyond the paper, prompts may be given in parts, one an iteration, and selection stops at the
    first request that would bring a micro-batch of several beyond `max_batch_tokens`.
    """

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        super().__init__(sizes, stages)
        self._waiting: deque[Request] = deque()
        self._arrivals = 0  # of requests that were admitted

    def _enqueue(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)

    def _give_up_waiting(self, custom_id: str) -> None:
        self._waiting = deque(r for r in self._waiting if r.custom_id != custom_id)

    @property
    def wants_requests(self) -> bool:
        """Whether a selection could come to the end of the queue, and more may follow there."""
        candidates = len(self._waiting) + int(np.count_nonzero(self._slots.ready))
        return not self._closed and candidates < self._sizes.max_batch_size

    @property
    def waiting(self) -> int:
        """Number of requests without a reservation."""
        return len(self._waiting)

    def _admit(self, selected: int, tokens: int) -> tuple[list[int], tuple[Move, ...]]:
        slots: list[int] = []
        moves: tuple[Move, ...] = ()
        most = self._sizes.max_batch_tokens
        while self._waiting and selected + len(slots) < self._sizes.max_batch_size:
            request = self._waiting[0]
            count = self._slots.first_part(len(request.prompt_ids) + len(request.generated))
            if most_tokens(request) > self._slots.available:
                break
            if most and tokens and tokens + count > most:
                break
            self._waiting.popleft()
            slot = self._slots.take(request, self._arrivals)
            self._arrivals += 1
            moves += self._slots.reserve(slot, most_tokens(request))
            slots.append(slot)
            tokens += count
        return slots, moves


def orca_sizes(plan: PlanSpec, options: PolicyOptions) -> QueueSizes:
    """The sizes for the KV cache of `plan`."""
    return token_slot_sizes(plan, options, "orca")
