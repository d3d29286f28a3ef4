"""The policy `orca`: iteration-level scheduling over token slots (ORCA, Algorithm 1).

Lines 17 to 28 of the algorithm are `next_batch`, whose decisions are those of
`planner.schedule.orca`, and lines 11 to 14 `complete`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.messages import Finished, MicroBatch, Move, Request, Sampled, TokenIds
from actors.schedule.request_slots import RequestSlots, most_tokens, text_tokens
from actors.schedule.scheduler import QueueSizes, Scheduler, check_reservable, most_in_slots
from planner.plan.spec import PlanSpec
from planner.schedule.orca import OrcaPolicy, Waiting
from planner.schedule.passes import OrcaSizes, policy_sizes
from planner.scheduling import PolicyName, PolicyOptions


class OrcaScheduler(Scheduler):
    """A scheduler that selects, for every iteration anew, the requests that came first.

    A micro-batch has up to `max_batch_size` requests in the order of their arrival, some with their
    prompt, whole or in parts (initiation phase), and some with one token (increment phase). When a
    request is selected first, it reserves token slots for its prompt and all of its new tokens;
    where there are too few, selection stops there, so that no later request overtakes it. A request
    under way is not selected again before its micro-batch is back. The order depends neither on
    time, where all requests are there, nor on the chunks in which they are added.
    """

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        _check(sizes)
        self._policy = self._make_policy(
            OrcaSizes(
                sizes.max_batch_size,
                sizes.n_slots or sizes.kv_tokens,
                sizes.max_batch_tokens,
                sizes.prefill_chunk_tokens,
                sizes.policy,
            ),
            stages,
        )
        slots, n_slots = min(self._policy.slots, sizes.slots), self._policy.sizes.n_slots
        self._slots: RequestSlots = RequestSlots(
            slots, sizes.kv_tokens, n_slots, self._policy.chunk
        )
        self._waiting: dict[int, Request] = {}  # by the number of the arrival
        self._arrivals = 0

    def _make_policy(self, sizes: OrcaSizes, stages: int) -> OrcaPolicy:
        return OrcaPolicy(sizes, stages)

    def _first_reservation(self, request: Request) -> int:
        return most_tokens(request)

    def add(self, requests: Sequence[Request]) -> None:
        self._slots.expect(requests)
        for request in requests:
            text, size = text_tokens(request), self._first_reservation(request)
            self._wait(request, Waiting(self._arrivals, text, size))
            self._arrivals += 1

    def _wait(self, request: Request, waiting: Waiting) -> None:
        self._waiting[waiting.request] = request
        self._policy.queue.add(waiting)

    @property
    def wants_requests(self) -> bool:
        return self._policy.wants(int(np.count_nonzero(self._slots.ready)))

    @property
    def most_under_way(self) -> int:
        return self._policy.most_under_way

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """Select the ready requests that came first, and newcomers; None for now."""
        return self._selected(())

    def _selected(self, moves: tuple[Move, ...]) -> tuple[MicroBatch, TokenIds] | None:
        """The next micro-batch, with `moves` before those for its newcomers."""
        held = self._slots
        ready = held.ready_slots()[: self._policy.sizes.max_batch_size]
        tokens = held.counts(ready).cumsum()
        in_all = int(tokens[-1]) if len(ready) else 0
        new: list[int] = []
        for each in self._policy.admitted(len(ready), in_all, held.available, held.free):
            request = self._waiting.pop(each.request)
            slot, more = held.take(request, each.request, each.size)
            moves += more
            new.append(slot)
        self._admitted(new)
        kept = ready[: self._policy.selected(tokens)]
        slots = np.append(kept, np.array(new, dtype=np.int64))
        return held.batch(slots, new, moves) if len(slots) else None

    def _admitted(self, slots: Sequence[int]) -> None:
        """Note that requests have come into slots, all of which have their ranges now."""

    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        return self._slots.complete(batch, sampled)

    def cancel(self, custom_id: str) -> None:
        for arrival in [n for n, r in self._waiting.items() if r.custom_id == custom_id]:
            self._give_up(arrival)
        self._slots.cancel(custom_id)

    def _give_up(self, arrival: int) -> None:
        self._policy.queue.give_up(arrival)
        del self._waiting[arrival]


def orca_sizes(plan: PlanSpec, options: PolicyOptions, policy: PolicyName = "orca") -> QueueSizes:
    """The sizes of `policy` for the KV cache of `plan`. The tokens of a micro-batch are at most
    those for whose activations the plan has memory: with `static` it has none for steps beside
    prompts.
    """
    sizes, workload = plan.micro_batches, plan.workload
    most = options.max_batch_size or sizes.decode
    planned = policy_sizes(plan.policy, workload, sizes)
    tokens = sizes.prefill * workload.prompt_length
    if isinstance(planned, OrcaSizes):
        tokens = planned.max_batch_tokens
    return QueueSizes(
        slots=most_in_slots(plan, len(plan.stages) * most),
        prefill_micro_batch=sizes.prefill,
        decode_micro_batch=sizes.decode,
        slot_tokens=workload.total_length,
        policy=policy,
        kv_tokens=workload.kv_tokens,
        n_slots=workload.reservable_under(policy),
        max_batch_size=most,
        max_batch_tokens=max(tokens, most),
        prefill_chunk_tokens=options.prefill_chunk_tokens,
    )


def _check(sizes: QueueSizes) -> None:
    optional = ("max_batch_tokens", "prefill_chunk_tokens", "park_tokens_from", "parked_tokens")
    needed = ("kv_tokens", "max_batch_size", "slots")
    check_reservable(sizes, dict.fromkeys(needed, 1) | dict.fromkeys(optional, 0))
