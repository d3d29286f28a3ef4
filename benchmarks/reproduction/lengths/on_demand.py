"""The rival that predicts nothing: KV memory in blocks on demand, as vLLM has it.

A request takes a block when its tokens need one, prompts whole. Where none is free, the request
that came last is preempted: it gives up all of its blocks, and is computed again from its prompt
and the tokens that it has, before all that wait. Newcomers join while enough blocks for their
prompt are free and a few more (the watermark), up to `max_batch_tokens` in an iteration, and not in
an iteration in which somebody was preempted.

Blocks lie anywhere, so that no range has to be moved; the token slots of the messages have no
meaning. This is for virtual time only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from actors.messages import Admission, Finished, MicroBatch, Request, Sampled, TokenIds
from actors.schedule.scheduler import Scheduler

BLOCK_TOKENS = 16
WATERMARK = 0.01
"""Share of blocks that newcomers leave free; both figures are vLLM's defaults."""


@dataclass(eq=False)
class _Running:
    """A request that holds blocks; `prefill` tokens were there when it joined."""

    request: Request
    arrival: int
    prefill: int
    written: int = 0
    blocks: int = 0
    given: list[int] = field(default_factory=list)
    ready: bool = True
    is_given_up: bool = False

    @property
    def name(self) -> str:
        return self.request.custom_id


class OnDemandScheduler(Scheduler):
    """A scheduler of blocks on demand for `kv_tokens` token slots.

    `preemptions` and `computed_again` count what preemption has cost: how often, and tokens.
    """

    def __init__(
        self, kv_tokens: int, stages: int, max_batch_size: int, max_batch_tokens: int
    ) -> None:
        self.preemptions = 0
        self.computed_again = 0
        self._free = self._blocks = kv_tokens // BLOCK_TOKENS
        self._stages = stages
        self._most = max_batch_size
        self._most_tokens = max_batch_tokens
        self._waiting: deque[tuple[int, Request]] = deque()
        self._arrivals = 0
        self._running: dict[int, _Running] = {}  # by slot, in the order of their arrival
        self._free_slots: list[int] = []

    def expect(self, requests: Sequence[Request]) -> None:
        """Do nothing: a request's slots are found one block after the other."""

    def add(self, requests: Sequence[Request]) -> None:
        """Put `requests` at the end of the queue."""
        for request in requests:
            self._waiting.append((self._arrivals, request))
            self._arrivals += 1

    @property
    def wants_requests(self) -> bool:
        """Whether the queue may be too short to fill a micro-batch."""
        return len(self._waiting) < self._most

    @property
    def most_under_way(self) -> int:
        """Most micro-batches that may be under way: one a stage."""
        return self._stages

    @property
    def waiting(self) -> int:
        """Number of requests that hold no blocks."""
        return len(self._waiting)

    @property
    def requests(self) -> dict[int, Request]:
        """Those that do, by slot."""
        return {slot: each.request for slot, each in self._running.items()}

    def slot_tokens(self) -> dict[int, tuple[str, TokenIds]]:
        """Return, by slot, the `custom_id` of its request and the new tokens."""
        return {s: (r.name, np.array(r.given, dtype=np.int64)) for s, r in self._running.items()}

    def cancel(self, custom_id: str) -> None:
        """Give up a request; its blocks are free with its next token."""
        self._waiting = deque(each for each in self._waiting if each[1].custom_id != custom_id)
        for running in self._running.values():
            running.is_given_up |= running.name == custom_id

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """Those that are ready, in the order of their arrival, and newcomers."""
        selected: list[int] = []
        preempted = False
        ready = deque(sorted((s for s, r in self._running.items() if r.ready), key=self._arrival))
        while ready and len(selected) < self._most:
            slot = ready.popleft()
            while self._missing(slot) > self._free:
                victim = ready.pop() if ready else slot
                self._preempt(victim)
                preempted = True
                if victim == slot:
                    break
            else:
                self._take(slot)
                selected.append(slot)
        admitted = [] if preempted else self._admit(len(selected))
        selected += [each.slot for each in admitted]
        return self._batch(selected, tuple(admitted)) if selected else None

    def _arrival(self, slot: int) -> int:
        return self._running[slot].arrival

    def _count(self, running: _Running) -> int:
        return max(running.prefill - running.written, 1)

    def _missing(self, slot: int) -> int:
        """Blocks that the request of `slot` needs for its next tokens and has not."""
        running = self._running[slot]
        return -(-(running.written + self._count(running)) // BLOCK_TOKENS) - running.blocks

    def _take(self, slot: int) -> None:
        missing = self._missing(slot)
        self._free -= missing
        self._running[slot].blocks += missing

    def _preempt(self, slot: int) -> None:
        running = self._running.pop(slot)
        self._free += running.blocks
        self._free_slots.append(slot)
        self.preemptions += 1
        self.computed_again += running.written
        request = replace(running.request, generated=tuple(running.given))
        self._waiting.appendleft((running.arrival, request))

    def _admit(self, selected: int) -> list[Admission]:
        """Newcomers beside so many requests, each of which takes a step."""
        admitted: list[Admission] = []
        kept = int(WATERMARK * self._blocks)
        joined = selected
        while self._waiting and selected + len(admitted) < self._most:
            arrival, request = self._waiting[0]
            tokens = len(request.prompt_ids) + len(request.generated)
            running = _Running(request, arrival, tokens, given=list(request.generated))
            needed = -(-tokens // BLOCK_TOKENS)
            if needed > self._free - (kept if self._running else 0):
                break
            if joined and joined + tokens > self._most_tokens:
                break
            joined += tokens
            self._waiting.popleft()
            slot = self._free_slots.pop() if self._free_slots else len(self._running)
            self._running[slot] = running
            self._take(slot)
            admitted.append(Admission.of(slot, request))
        return admitted

    def _batch(
        self, slots: Sequence[int], admitted: tuple[Admission, ...]
    ) -> tuple[MicroBatch, TokenIds]:
        each = [self._running[slot] for slot in slots]
        starts = np.array([r.written for r in each], dtype=np.int64)
        counts = np.array([self._count(r) for r in each], dtype=np.int64)
        for running, count in zip(each, counts.tolist(), strict=True):
            running.written += count
            running.ready = False
        samples = np.array([r.written >= r.prefill for r in each], dtype=np.bool_)
        batch = MicroBatch(
            np.array(slots, dtype=np.int64),
            starts,
            counts,
            np.zeros(len(each), dtype=np.int64),
            admitted,
            samples=None if samples.all() else samples,
        )
        return batch, np.zeros(int(counts.sum()), dtype=np.int64)

    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        """Take in the tokens of `batch`; returns the requests that ended with it."""
        for slot in batch.slots.tolist():
            self._running[slot].ready = True
        ended: list[Finished] = []
        slots = batch.slots[batch.sampled_rows].tolist()
        for slot, token, reason in zip(
            slots, sampled.token_ids.tolist(), sampled.finish_reasons, strict=True
        ):
            running = self._running[slot]
            running.given.append(token)
            if reason is None and not running.is_given_up:
                continue
            del self._running[slot]
            self._free += running.blocks
            self._free_slots.append(slot)
            if reason is not None and not running.is_given_up:
                ended.append(Finished(running.name, tuple(running.given), reason))
        return tuple(ended)
