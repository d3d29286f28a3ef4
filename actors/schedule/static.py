"""The policy `static`: a queue of any length over the planned KV slots and micro-batches.

Prefill has micro-batches of one size and decode of another (LLM-PQ section 4.3); as every request
keeps its range of the KV cache, regrouping between the phases moves nothing.
"""

from __future__ import annotations

import numpy as np

from actors.messages import Admission, Finished, MicroBatch, Sampled, TokenIds, TokenRange
from actors.schedule.request_slots import SlotRequests, computed_parts
from actors.schedule.scheduler import QueueScheduler, QueueSizes
from planner.schedule.static import SlotGroup, StaticPolicy
from planner.workload import MicroBatches


class StaticScheduler(QueueScheduler):
    """A scheduler that keeps requests in a queue until one of the KV slots is free: each slot has a
    range of the KV cache for the longest request.

    Each run of `decode_micro_batch` slots is a decode group, so that a full group is one block of
    the KV cache. `StaticPolicy` decides what comes next; here are the requests and their tokens.
    The order depends neither on time nor, where chunks fill the slots at least, on the chunks in
    which requests are added.
    """

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        slots = sizes.slots
        super().__init__(SlotRequests(slots))
        planned = MicroBatches(sizes.prefill_micro_batch, sizes.decode_micro_batch)
        self._policy = StaticPolicy(slots, planned, stages)
        self._slot_tokens = sizes.slot_tokens
        self._decodes = np.zeros(slots, dtype=np.bool_)  # slots whose request is prefilled
        self._prompt = np.zeros(slots, dtype=np.int64)  # length of its prompt

    @property
    def most_under_way(self) -> int:
        return self._policy.most_under_way

    @property
    def wants_requests(self) -> bool:
        return self._policy.wants(len(self._waiting))

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        following = self._policy.next(len(self._waiting))
        if following is None:
            return None
        if isinstance(following, SlotGroup):
            return self._decode(following)
        return self._prefill(following)

    def _prefill(self, slots: list[int]) -> tuple[MicroBatch, TokenIds]:
        requests = [self._waiting.popleft() for _ in slots]
        admitted = tuple(
            Admission.of(slot, request, TokenRange(slot * self._slot_tokens, self._slot_tokens))
            for slot, request in zip(slots, requests, strict=True)
        )
        texts = list(map(self._slots.put, slots, requests))
        starts, counts, token_ids = computed_parts(requests, texts)
        slot_array = np.array(slots, dtype=np.int64)
        self._prompt[slot_array] = starts + counts - self._slots.given[slot_array]
        return self._batch(slot_array, starts, counts, admitted), token_ids

    def _decode(self, group: SlotGroup) -> tuple[MicroBatch, TokenIds]:
        slots = group.first + np.flatnonzero(self._decodes[group.first : group.end])
        starts = self._prompt[slots] + self._slots.given[slots] - 1
        return self._batch(slots, starts, np.ones_like(starts)), self._slots.last_tokens(slots)

    def _batch(
        self,
        slots: TokenIds,
        starts: TokenIds,
        counts: TokenIds,
        admitted: tuple[Admission, ...] = (),
    ) -> MicroBatch:
        begins, sizes = slots * self._slot_tokens, np.full_like(slots, self._slot_tokens)
        return MicroBatch(slots, starts, counts, begins, admitted, sizes=sizes)

    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        slots, policy = batch.slots.tolist(), self._policy
        self._decodes[slots] = True
        touched = policy.prefilled(slots) if batch.admitted else policy.stepped(slots[0])
        finished = self._slots.complete(batch, sampled)
        for slot in slots:
            if slot not in self.requests:
                self._decodes[slot] = False
                policy.leave(slot)
        policy.settle(touched)
        return finished
