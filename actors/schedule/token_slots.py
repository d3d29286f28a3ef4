"""What the policies have in common whose requests reserve token slots and are selected for every
iteration anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from actors.messages import Finished, MicroBatch, Move, Request, Sampled, TokenIds
from actors.schedule.request_slots import RequestSlots
from actors.schedule.scheduler import QueueSizes, check_reservable
from actors.stage_figures import NO_SUPERVISION, Supervision
from planner.plan.spec import PlanSpec
from planner.schedule.policy_sizes import OrcaSizes, policy_sizes
from planner.scheduling import PolicyName, PolicyOptions
from quant.common.errors import SpecError


class TokenSlotScheduler(ABC):
    """A scheduler whose micro-batches have up to `max_batch_size` requests in the order of their
    arrival, some with their prompt, whole or in parts, and some with one token.

    A policy says which requests of its queue `_admit` gives a reservation, and of what size. A
    request under way is not selected again before its micro-batch is back.

    Slots number the requests that have a reservation: `stages * max_batch_size` are enough. A
    request reserves only when every ready one was put into the same micro-batch before it and there
    was still room in that. So afterwards all that have a reservation are in this micro-batch or in
    one of the `stages - 1` at most that are under way then, each of at most `max_batch_size`
    requests; the number grows at no other time.
    """

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        _check(sizes, stages)
        self._sizes = sizes
        self._stages = stages
        self._closed = False
        slots = stages * sizes.max_batch_size
        n_slots = sizes.n_slots or sizes.kv_tokens
        self._slots = RequestSlots(slots, sizes.kv_tokens, n_slots, sizes.prefill_chunk_tokens)

    @abstractmethod
    def _enqueue(self, requests: Sequence[Request]) -> None:
        """Put `requests` at the end of the queue."""

    @abstractmethod
    def _give_up_waiting(self, custom_id: str) -> None:
        """Take a request out of the queue, where it is in there."""

    @abstractmethod
    def _admit(self, selected: int, tokens: int) -> tuple[list[int], tuple[Move, ...]]:
        """Reserve token slots for requests of the queue that join a micro-batch of so many requests
        and tokens; returns their slots and the moves for them.

        Where the ready ones alone go beyond the bound of tokens, every newcomer does.
        """

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of requests without a reservation."""

    def add(self, requests: Sequence[Request], last: bool) -> None:
        """Put `requests` at the end of the queue; after the `last` ones no more come.

        Raises SpecError for a request with more tokens than all may reserve together.
        """
        self._slots.expect(requests)
        self._enqueue(requests)
        self._closed = last

    @property
    def most_under_way(self) -> int:
        """Most micro-batches that may be under way: one a stage, so that each has one."""
        return self._stages

    @property
    def in_slots(self) -> int:
        """Number of requests that have a reservation."""
        return len(self._slots.requests)

    @property
    def supervision(self) -> Supervision:
        """What was done about reservations that were too small."""
        return NO_SUPERVISION

    def slot_tokens(self) -> dict[int, tuple[str, TokenIds]]:
        """Return, by slot, the `custom_id` of its request and the new tokens; none of cancelled
        requests.
        """
        return self._slots.tokens()

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """Select requests: the ready ones that came first, and newcomers; None where none can be
        selected now.
        """
        return self._selected(())

    def _selected(self, moves: tuple[Move, ...]) -> tuple[MicroBatch, TokenIds] | None:
        """The next micro-batch, with `moves` before those for its newcomers."""
        ready = self._slots.ready_slots()[: self._sizes.max_batch_size]
        tokens = self._slots.counts(ready).cumsum()
        most = self._sizes.max_batch_tokens
        selected = max(1, int(np.searchsorted(tokens, most, "right"))) if most else len(ready)
        new, more = self._admit(len(ready), int(tokens[-1]) if len(ready) else 0)
        slots = np.append(ready[:selected], np.array(new, dtype=np.int64))
        return self._slots.batch(slots, new, moves + more) if len(slots) else None

    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        """Take in the tokens of `batch`; returns the requests that ended with it."""
        return self._slots.complete(batch, sampled)

    def cancel(self, custom_id: str) -> None:
        """Give up a request: it leaves the queue or its slot now, or when its micro-batch is back.

        Nothing is told of it any more.
        """
        self._give_up_waiting(custom_id)
        self._slots.cancel(custom_id)


def token_slot_sizes(plan: PlanSpec, options: PolicyOptions, policy: PolicyName) -> QueueSizes:
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
        slots=len(plan.stages) * most,
        prefill_micro_batch=sizes.prefill,
        decode_micro_batch=sizes.decode,
        slot_tokens=workload.total_length,
        policy=policy,
        kv_tokens=workload.kv_tokens,
        n_slots=workload.reservable_tokens,
        max_batch_size=most,
        max_batch_tokens=max(tokens, most),
        prefill_chunk_tokens=options.prefill_chunk_tokens,
    )


def _check(sizes: QueueSizes, stages: int) -> None:
    """Raise SpecError where `sizes` cannot be those of `stages` stages."""
    for name, least in (
        ("kv_tokens", 1),
        ("max_batch_size", 1),
        ("max_batch_tokens", 0),
        ("prefill_chunk_tokens", 0),
        ("park_tokens_from", 0),
        ("parked_tokens", 0),
    ):
        value = getattr(sizes, name)
        if value < least:
            raise SpecError(f"{name} is {value}; the policy {sizes.policy} needs at least {least}")
    check_reservable(sizes)
    needed = stages * sizes.max_batch_size
    if sizes.slots < needed:
        raise SpecError(
            f"{stages} micro-batches of {sizes.max_batch_size} requests need {needed} slots, not "
            f"{sizes.slots}; lower max_batch_size"
        )
