"""What a scheduling policy is given, and what it must offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.messages import Finished, MicroBatch, Request, Sampled, TokenIds
from actors.transport.message_limits import Limits
from planner.plan.spec import PlanSpec


@dataclass(frozen=True)
class QueueSizes:
    """Slots of requests, the planned requests of a micro-batch of each phase, the tokens of the
    longest request (`slot_tokens`), and the scheduling policy by its name in
    `actors.schedule.table`.
    """

    slots: int
    prefill_micro_batch: int
    decode_micro_batch: int
    slot_tokens: int
    policy: str = "static"

    @classmethod
    def of(cls, plan: PlanSpec) -> QueueSizes:
        """The sizes that `plan` asks for."""
        sizes = plan.micro_batches
        workload = plan.workload
        return cls(workload.global_batch, sizes.prefill, sizes.decode, workload.total_length)

    def limits(self, max_tokens: int, kv_tokens: int, columns: int) -> Limits:
        """The most that messages may hold, a micro-batch of each phase in one, where a request has
        at most `max_tokens` and the KV cache `kv_tokens`.
        """
        rows = self.prefill_micro_batch * max_tokens + self.decode_micro_batch
        requests = self.prefill_micro_batch + self.decode_micro_batch
        return Limits(requests, rows, columns, self.slots, max_tokens, kv_tokens)


class Scheduler(Protocol):
    """A scheduling policy: plain Python without a device or a clock.

    It decides which micro-batch comes next and takes in the tokens that were sampled. Each policy
    is one file beside this one, and one entry of `actors.schedule.table`.
    """

    def add(self, requests: Sequence[Request], last: bool) -> None:
        """Put `requests` at the end of the queue; after the `last` ones no more come."""

    @property
    def wants_requests(self) -> bool:
        """Tell whether it should be given more requests before it is asked for a micro-batch."""

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """The next micro-batch and its token ids, or None when it waits for those under way."""

    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        """Take in the tokens of `batch`; returns the requests that ended with it."""

    @property
    def waiting(self) -> int:
        """Number of requests without a KV slot."""

    @property
    def in_slots(self) -> int:
        """Number of requests that have a KV slot."""

    def slot_tokens(self) -> dict[int, tuple[str, TokenIds]]:
        """Return, by slot, the `custom_id` of its request and the new tokens."""
