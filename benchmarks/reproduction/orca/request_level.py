"""Request-level scheduling, the baseline of ORCA sec. 6.2: batches as FasterTransformer has them.

A batch takes what waits, up to `max_batch_size` requests, when the batch before it is over; nobody
joins or leaves it. It is split into micro-batches of `micro_batch_size`, which follow each other
through the pipeline. The first pass takes as many tokens of every prompt as the shortest one has.
From then on all requests stand at the same position and take one token a pass: of their prompt
where that is longer, else the one sampled last. Requests that are done go on with the others, and
nothing returns before the batch is over.

So that tokens come when this engine would give them, the last token of each request is sampled in
the batch's last pass. It is not the token that the model would give: this is for measuring only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.messages import (
    Admission,
    Finished,
    MicroBatch,
    Request,
    Sampled,
    TokenIds,
    TokenRange,
)
from actors.schedule.scheduler import Scheduler


@dataclass(eq=False)
class _Group:
    """A micro-batch of the present batch: its slots, and the tokens that each of them has."""

    slots: TokenIds
    written: int = 0
    under_way: bool = False


class RequestLevelScheduler(Scheduler):
    """A scheduler that runs one batch after the other, each until its last request is done.

    Each request has a range of `slot_tokens` token slots, as many as the longest request needs:
    ValueError unless `kv_tokens` has room for `max_batch_size` of them.
    """

    def __init__(
        self, max_batch_size: int, micro_batch_size: int, slot_tokens: int, kv_tokens: int
    ) -> None:
        if max_batch_size * slot_tokens > kv_tokens:
            raise ValueError(
                f"{max_batch_size} requests of {slot_tokens} tokens do not fit {kv_tokens} slots"
            )
        self._max_batch_size = max_batch_size
        self._micro_batch_size = micro_batch_size
        self._slot_tokens = slot_tokens
        self._waiting: deque[Request] = deque()
        self._batch: list[Request] = []  # by slot
        self._tokens: list[list[int]] = []  # by slot, those that were sampled
        self._gone: set[int] = set()  # slots of requests that have ended or were cancelled
        self._groups: list[_Group] = []
        self._end = 0  # tokens of each slot after the batch's last pass

    def expect(self, requests: Sequence[Request]) -> None:
        """Do nothing: requests of FasterTransformer share no heads of their prompts."""

    def add(self, requests: Sequence[Request]) -> None:
        """Put `requests` at the end of the queue."""
        self._waiting.extend(requests)

    @property
    def wants_requests(self) -> bool:
        """Whether the next batch could be larger."""
        return not self._groups and len(self._waiting) < self._max_batch_size

    @property
    def most_under_way(self) -> int:
        """Most micro-batches that may be under way: all of a batch."""
        return -(-self._max_batch_size // self._micro_batch_size)

    @property
    def waiting(self) -> int:
        """Number of requests that no batch has taken."""
        return len(self._waiting)

    @property
    def requests(self) -> dict[int, Request]:
        """Those of the batch that have not ended, by slot."""
        return {slot: each for slot, each in enumerate(self._batch) if slot not in self._gone}

    def slot_tokens(self) -> dict[int, tuple[str, TokenIds]]:
        """Return, by slot, the `custom_id` of its request and the new tokens."""
        return {
            slot: (request.custom_id, np.array(self._tokens[slot], dtype=np.int64))
            for slot, request in self.requests.items()
        }

    def cancel(self, custom_id: str) -> None:
        """Give up a request; in the batch it is computed to the end all the same."""
        self._waiting = deque(r for r in self._waiting if r.custom_id != custom_id)
        self._gone |= {s for s, r in enumerate(self._batch) if r.custom_id == custom_id}

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """The next pass of the first micro-batch that is back; a new batch where there is none."""
        if not self._groups and self._waiting:
            self._begin_batch()
        group = next((g for g in self._groups if not g.under_way), None)
        return None if group is None else self._pass_of(group)

    def _begin_batch(self) -> None:
        size = min(self._max_batch_size, len(self._waiting))
        self._batch = [self._waiting.popleft() for _ in range(size)]
        self._tokens = [[] for _ in self._batch]
        self._gone = set()
        self._end = max(len(r.prompt_ids) + r.max_new_tokens for r in self._batch) - 1
        slots = np.arange(size)
        self._groups = [
            _Group(slots[first : first + self._micro_batch_size])
            for first in range(0, size, self._micro_batch_size)
        ]

    def _pass_of(self, group: _Group) -> tuple[MicroBatch, TokenIds]:
        first = not group.written
        start = group.written
        count = min(len(r.prompt_ids) for r in self._batch) if first else 1
        group.written += count
        group.under_way = True
        slots = group.slots
        token_ids = [
            self._token(s, at) for s in slots.tolist() for at in range(start, start + count)
        ]
        samples = np.array([self._samples(slot, group.written) for slot in slots.tolist()])
        batch = MicroBatch(
            slots,
            np.full_like(slots, start),
            np.full_like(slots, count),
            slots * self._slot_tokens,
            tuple(self._admission(slot) for slot in slots.tolist()) if first else (),
            samples=None if samples.all() else samples,
        )
        return batch, np.array(token_ids, dtype=np.int64)

    def _admission(self, slot: int) -> Admission:
        room = TokenRange(slot * self._slot_tokens, self._slot_tokens)
        return Admission.of(slot, self._batch[slot], room)

    def _token(self, slot: int, at: int) -> int:
        prompt = self._batch[slot].prompt_ids
        if at < len(prompt):
            return prompt[at]
        return self._tokens[slot][-1] if self._tokens[slot] else prompt[-1]

    def _samples(self, slot: int, written: int) -> bool:
        """Whether a pass that brings the slot to so many tokens samples its next one."""
        request = self._batch[slot]
        missing = request.max_new_tokens - len(self._tokens[slot])
        if slot in self._gone or written == self._end:
            return slot not in self._gone
        return written >= len(request.prompt_ids) and missing > 1

    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        """Take in the tokens of `batch`; returns the requests that ended with it."""
        finished: list[Finished] = []
        slots = batch.slots[batch.sampled_rows].tolist()
        for slot, token, reason in zip(
            slots, sampled.token_ids.tolist(), sampled.finish_reasons, strict=True
        ):
            self._tokens[slot].append(token)
            if reason is not None and slot not in self._gone:
                self._gone.add(slot)
                custom_id = self._batch[slot].custom_id
                finished.append(Finished(custom_id, tuple(self._tokens[slot]), reason))
        group = next(g for g in self._groups if g.slots[0] == batch.slots[0])
        group.under_way = False
        if group.written == self._end:
            self._groups.remove(group)
        return tuple(finished)
