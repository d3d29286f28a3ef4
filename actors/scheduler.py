"""Static-batch scheduling: prefill micro-batches first, then decode micro-batches round and round.

Plain Python without a device: it says which micro-batch comes next and takes in what was sampled.
One global batch has its prefill in micro-batches of one size and its decode in micro-batches of
another (LLM-PQ section 4.3); as every request keeps its KV slot, regrouping between the phases
moves nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from actors.messages import Admission, Finished, MicroBatch, Request, Sampled, TokenIds


class Scheduler(Protocol):
    """A scheduling policy: one file each."""

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """The next micro-batch and its token ids, or None when it waits for what is under way."""

    def complete(self, batch: MicroBatch, sampled: Sampled) -> Iterator[Finished]:
        """Take in the tokens of `batch`; yields the requests that ended with it."""


@dataclass
class _Running:
    request: Request
    slot: int
    token_ids: list[int] = field(default_factory=list)


class StaticBatchScheduler:
    """One global batch of at most `slots` requests.

    A decode micro-batch starts as soon as all of its requests have their first token, and takes its
    next step as soon as the last one came back; finished requests leave it.
    """

    def __init__(
        self, requests: Iterable[Request], prefill_micro_batch: int, decode_micro_batch: int
    ) -> None:
        self._running = {slot: _Running(r, slot) for slot, r in enumerate(requests)}
        slots = list(self._running)
        self._prefills = deque(_chunks(slots, prefill_micro_batch))
        self._groups = _chunks(slots, decode_micro_batch)
        self._group_of = {slot: i for i, group in enumerate(self._groups) for slot in group}
        self._waiting = [len(group) for group in self._groups]
        self._ready: deque[int] = deque()

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """Prefills in order, then the decode groups that are ready."""
        if self._prefills:
            return self._prefill(self._prefills.popleft())
        while self._ready:
            group = [s for s in self._groups[self._ready.popleft()] if s in self._running]
            if group:
                return self._decode(group)
        return None

    def _prefill(self, slots: list[int]) -> tuple[MicroBatch, TokenIds]:
        requests = [self._running[slot].request for slot in slots]
        admitted = tuple(
            Admission(slot, r.custom_id, r.max_new_tokens, r.sampling)
            for slot, r in zip(slots, requests, strict=True)
        )
        counts = np.array([len(r.prompt_ids) for r in requests], dtype=np.int64)
        tokens = np.concatenate([np.array(r.prompt_ids, dtype=np.int64) for r in requests])
        starts = np.zeros(len(slots), dtype=np.int64)
        return MicroBatch(np.array(slots, dtype=np.int64), starts, counts, admitted), tokens

    def _decode(self, slots: list[int]) -> tuple[MicroBatch, TokenIds]:
        running = [self._running[slot] for slot in slots]
        starts = np.array(
            [len(r.request.prompt_ids) + len(r.token_ids) - 1 for r in running], dtype=np.int64
        )
        tokens = np.array([r.token_ids[-1] for r in running], dtype=np.int64)
        slot_array = np.array(slots, dtype=np.int64)
        return MicroBatch(slot_array, starts, np.ones_like(starts)), tokens

    def complete(self, batch: MicroBatch, sampled: Sampled) -> Iterator[Finished]:
        """Take in the tokens of `batch`; yields the requests that ended with it."""
        touched: dict[int, None] = {}
        results = zip(
            batch.slots.tolist(), sampled.token_ids.tolist(), sampled.finish_reasons, strict=True
        )
        for slot, token, reason in results:
            running = self._running[slot]
            running.token_ids.append(token)
            touched[self._group_of[slot]] = None
            if batch.admitted:
                self._waiting[self._group_of[slot]] -= 1
            if reason is not None:
                del self._running[slot]
                yield Finished(running.request.custom_id, tuple(running.token_ids), reason)
        self._ready.extend(group for group in touched if self._waiting[group] == 0)


def _chunks(items: list[int], size: int) -> list[list[int]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
