"""Sizes of queues for the policy `exegpt`."""

from __future__ import annotations

from actors.schedule.scheduler import QueueSizes
from planner.schedule.passes import TurnSizes


def queue_sizes_of(sizes: TurnSizes, kv_tokens: int) -> QueueSizes:
    """The sizes of an actor's queue, with so many token slots in its KV cache."""
    return QueueSizes(
        slots=sizes.slots,
        prefill_micro_batch=sizes.prefill_micro_batch,
        decode_micro_batch=sizes.decode_micro_batch,
        slot_tokens=kv_tokens,
        policy="exegpt",
        kv_tokens=kv_tokens,
        n_slots=sizes.n_slots,
        schedule=sizes.schedule,
    )
