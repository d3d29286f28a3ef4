"""The policy `static`: a queue of any length over the planned KV slots and micro-batches.

Prefill has micro-batches of one size and decode of another (LLM-PQ section 4.3); as every request
keeps its range of the KV cache, regrouping between the phases moves nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.messages import Admission, Finished, MicroBatch, Request, Sampled, TokenIds, TokenRange
from actors.schedule.scheduler import QueueSizes
from actors.stage_figures import NO_SUPERVISION, Supervision
from planner.schedule.static import UNDER_WAY_PER_STAGE, refill_from


@dataclass(eq=False)
class _Group:
    """A decode group: the slots from `first` up to `end`, which decode together.

    `free` slots have no request, `prefilling` ones wait for their first token, `decoding` ones have
    it. A group that `fills` has not stepped since it was last empty, and waits for all of its
    newcomers.
    """

    first: int
    end: int
    free: int
    prefilling: int = 0
    decoding: int = 0
    under_way: bool = False
    fills: bool = True


class StaticScheduler:
    """A scheduler that keeps requests in a queue until one of the KV slots is free: each slot has a
    range of the KV cache for the longest request.

    Each run of `decode_micro_batch` slots is a decode group, so that a full group is one block of
    the KV cache. The first requests fill all slots: prefills first, then every group steps as soon
    as all of its requests have their first token, and again as soon as its last step came back.
    Finished requests leave, the next ones of the queue take their slots, are prefilled while the
    groups decode, and join their group's next step. As long as there are both, prefills of
    newcomers and decode steps take turns. The order depends neither on time nor, where chunks fill
    the slots at least, on the chunks in which requests are added.
    """

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        slots = sizes.slots
        self._slot_tokens = sizes.slot_tokens
        self._prefill_micro_batch = sizes.prefill_micro_batch
        self._decode_micro_batch = sizes.decode_micro_batch
        self._refill_from = refill_from(slots, sizes.prefill_micro_batch, stages)
        self._most_under_way = UNDER_WAY_PER_STAGE * stages
        self._refills = True  # set while newcomers are prefilled: until no slot is free
        self._waiting: deque[Request] = deque()
        self._closed = False
        self._free = deque(range(slots))
        self._unused = slots  # free slots, in front of the others, that no request has had yet
        self._requests: dict[int, Request] = {}
        self._cancelled: set[int] = set()  # slots of requests that leave with their next token
        self._tokens = np.zeros((slots, 1), dtype=np.int64)
        self._given = np.zeros(slots, dtype=np.int64)  # tokens of each slot's request so far
        self._decodes = np.zeros(slots, dtype=np.bool_)  # slots whose request is prefilled
        self._prompt = np.zeros(slots, dtype=np.int64)  # length of its prompt
        self._groups = [
            _Group(first, end, end - first)
            for first in range(0, slots, sizes.decode_micro_batch)
            for end in [min(first + sizes.decode_micro_batch, slots)]
        ]
        self._ready: deque[_Group] = deque()
        self._decode_is_next = False

    def add(self, requests: Sequence[Request], last: bool) -> None:
        """Put `requests` at the end of the queue; after the `last` ones no more come."""
        self._waiting.extend(requests)
        self._closed = last
        longest = max((r.max_new_tokens for r in requests), default=0)
        missing = longest - self._tokens.shape[1]
        if missing > 0:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, missing)))

    def cancel(self, custom_id: str) -> None:
        """Give up a request: it leaves the queue now, or its slot with its next token."""
        self._waiting = deque(r for r in self._waiting if r.custom_id != custom_id)
        self._cancelled |= {s for s, r in self._requests.items() if r.custom_id == custom_id}

    @property
    def most_under_way(self) -> int:
        """Most micro-batches that may be under way at a time."""
        return self._most_under_way

    @property
    def waiting(self) -> int:
        """Number of requests without a slot."""
        return len(self._waiting)

    @property
    def in_slots(self) -> int:
        """Number of requests that have one."""
        return len(self._requests)

    @property
    def supervision(self) -> Supervision:
        """Nothing: every slot has room for the longest request."""
        return NO_SUPERVISION

    def slot_tokens(self) -> dict[int, tuple[str, TokenIds]]:
        """Return, by slot, the `custom_id` of its request and the new tokens; none of cancelled
        requests.
        """
        return {
            slot: (request.custom_id, self._tokens[slot, : self._given[slot]].copy())
            for slot, request in self._requests.items()
            if slot not in self._cancelled
        }

    @property
    def wants_requests(self) -> bool:
        """Whether slots could be filled, had the queue enough requests."""
        free = self._unused or len(self._free)
        if self._closed or len(self._waiting) >= min(self._prefill_micro_batch, free):
            return False
        return self._refills or self._a_group_is_empty()

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """Prefill the first global batch, then let prefills and decode steps take turns."""
        size = self._largest_prefill() if self._refills else 0
        group = next((g for g in self._ready if self._can_step(g, size)), None)
        if group is None and not size and self._a_group_is_empty():
            size = self._largest_prefill()
        if size and (self._unused or group is None or not self._decode_is_next):
            self._decode_is_next = True
            return self._prefill(size)
        if group is None:
            return None
        self._decode_is_next = False
        return self._decode(group)

    def _largest_prefill(self) -> int:
        free = self._unused or len(self._free)
        return min(self._prefill_micro_batch, free, len(self._waiting))

    def _a_group_is_empty(self) -> bool:
        """Whether fewer micro-batches go round than there are groups; a stage may then be idle."""
        return any(group.free == group.end - group.first for group in self._groups)

    @staticmethod
    def _can_step(group: _Group, prefill_size: int) -> bool:
        more_to_come = group.prefilling or (group.free and prefill_size)
        return not (group.fills and more_to_come)

    def _prefill(self, size: int) -> tuple[MicroBatch, TokenIds]:
        slots = sorted(self._free.popleft() for _ in range(size))
        self._unused = max(0, self._unused - size)
        self._refills &= bool(self._free)
        requests = [self._waiting.popleft() for _ in range(size)]
        for slot, request in zip(slots, requests, strict=True):
            self._requests[slot] = request
            group = self._group_of(slot)
            group.free -= 1
            group.prefilling += 1
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

    def _decode(self, group: _Group) -> tuple[MicroBatch, TokenIds]:
        self._ready.remove(group)
        group.under_way, group.fills = True, False
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
        """Take in the tokens of `batch`; returns the requests that ended with it."""
        slots = batch.slots
        self._tokens[slots, self._given[slots]] = sampled.token_ids
        self._given[slots] += 1
        self._decodes[slots] = True
        touched = self._take_back(batch)
        finished: list[Finished] = []
        for slot, reason in zip(slots.tolist(), sampled.finish_reasons, strict=True):
            if slot in self._cancelled:
                self._leave(slot)
            elif reason is not None:
                token_ids = tuple(self._tokens[slot, : self._given[slot]].tolist())
                finished.append(Finished(self._leave(slot).custom_id, token_ids, reason))
        for group in touched:
            if group.decoding and not group.under_way and group not in self._ready:
                self._ready.append(group)
            group.fills |= not group.decoding
        return tuple(finished)

    def _take_back(self, batch: MicroBatch) -> list[_Group]:
        """Note that `batch` is no longer under way; returns its decode groups in slot order."""
        if not batch.admitted:
            group = self._group_of(int(batch.slots[0]))
            group.under_way = False
            return [group]
        indices, counts = np.unique(batch.slots // self._decode_micro_batch, return_counts=True)
        groups = [self._groups[index] for index in indices]
        for group, count in zip(groups, counts.tolist(), strict=True):
            group.prefilling -= count
            group.decoding += count
        return groups

    def _leave(self, slot: int) -> Request:
        """Free `slot`; returns its request."""
        self._cancelled.discard(slot)
        group = self._group_of(slot)
        group.decoding -= 1
        group.free += 1
        self._decodes[slot] = False
        self._free.append(slot)
        self._refills |= len(self._free) >= self._refill_from
        return self._requests.pop(slot)

    def _group_of(self, slot: int) -> _Group:
        return self._groups[slot // self._decode_micro_batch]
