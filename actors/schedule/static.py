"""The policy `static`: a queue of any length over the planned KV slots and micro-batches.

Prefill has micro-batches of one size and decode of another (LLM-PQ section 4.3); as every request
keeps its range of the KV cache, regrouping between the phases moves nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from actors.messages import Admission, Finished, MicroBatch, Request, Sampled, TokenIds, TokenRange
from actors.schedule.scheduler import QueueSizes, Scheduler
from planner.schedule.static import SlotGroup, StaticPolicy
from planner.workload import MicroBatches


class StaticScheduler(Scheduler):
    """A scheduler that keeps requests in a queue until one of the KV slots is free: each slot has a
    range of the KV cache for the longest request.

    Each run of `decode_micro_batch` slots is a decode group, so that a full group is one block of
    the KV cache. `StaticPolicy` decides what comes next; here are the requests and their tokens.
    The order depends neither on time nor, where chunks fill the slots at least, on the chunks in
    which requests are added.
    """

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        slots = sizes.slots
        planned = MicroBatches(sizes.prefill_micro_batch, sizes.decode_micro_batch)
        self._policy = StaticPolicy(slots, planned, stages)
        self._slot_tokens = sizes.slot_tokens
        self._waiting: deque[Request] = deque()
        self.requests: dict[int, Request] = {}
        self._cancelled: set[int] = set()  # slots of requests that leave with their next token
        self._tokens = np.zeros((slots, 1), dtype=np.int64)
        self._given = np.zeros(slots, dtype=np.int64)  # tokens of each slot's request so far
        self._decodes = np.zeros(slots, dtype=np.bool_)  # slots whose request is prefilled
        self._prompt = np.zeros(slots, dtype=np.int64)  # length of its prompt

    def add(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)
        longest = max((r.max_new_tokens for r in requests), default=0)
        missing = longest - self._tokens.shape[1]
        if missing > 0:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, missing)))

    def cancel(self, custom_id: str) -> None:
        self._waiting = deque(r for r in self._waiting if r.custom_id != custom_id)
        self._cancelled |= {s for s, r in self.requests.items() if r.custom_id == custom_id}

    @property
    def most_under_way(self) -> int:
        return self._policy.most_under_way

    def slot_tokens(self) -> dict[int, tuple[str, TokenIds]]:
        return {
            slot: (request.custom_id, self._tokens[slot, : self._given[slot]].copy())
            for slot, request in self.requests.items()
            if slot not in self._cancelled
        }

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
        self.requests |= zip(slots, requests, strict=True)
        admitted = tuple(
            Admission.of(slot, request, TokenRange(slot * self._slot_tokens, self._slot_tokens))
            for slot, request in zip(slots, requests, strict=True)
        )
        texts = [np.array(r.prompt_ids + r.generated, dtype=np.int64) for r in requests]
        counts = np.array([len(text) for text in texts], dtype=np.int64)
        tokens = np.concatenate(texts)
        slot_array = np.array(slots, dtype=np.int64)
        self._given[slot_array] = [len(r.generated) for r in requests]
        self._prompt[slot_array] = counts - self._given[slot_array]
        for slot, request in zip(slots, requests, strict=True):
            self._tokens[slot, : len(request.generated)] = request.generated
        return self._batch(slot_array, np.zeros_like(slot_array), counts, admitted), tokens

    def _decode(self, group: SlotGroup) -> tuple[MicroBatch, TokenIds]:
        slots = group.first + np.flatnonzero(self._decodes[group.first : group.end])
        given = self._given[slots]
        tokens: TokenIds = self._tokens[slots, given - 1]
        starts = self._prompt[slots] + given - 1
        return self._batch(slots, starts, np.ones_like(starts)), tokens

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
        slots, policy = batch.slots, self._policy
        self._tokens[slots, self._given[slots]] = sampled.token_ids
        self._given[slots] += 1
        self._decodes[slots] = True
        each_slot = slots.tolist()
        touched = policy.prefilled(each_slot) if batch.admitted else policy.stepped(each_slot[0])
        finished: list[Finished] = []
        for slot, reason in zip(each_slot, sampled.finish_reasons, strict=True):
            if slot in self._cancelled:
                self._leave(slot)
            elif reason is not None:
                token_ids = tuple(self._tokens[slot, : self._given[slot]].tolist())
                finished.append(Finished(self._leave(slot).custom_id, token_ids, reason))
        policy.settle(touched)
        return tuple(finished)

    def _leave(self, slot: int) -> Request:
        self._cancelled.discard(slot)
        self._decodes[slot] = False
        self._policy.leave(slot)
        return self.requests.pop(slot)
