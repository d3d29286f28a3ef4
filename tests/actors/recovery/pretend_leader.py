"""The first stage of a pretend cluster: its queue, and the stream of what finishes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from actors.messages import Chunk, Finished, Request
from actors.processes.answers import StageDiedError
from actors.processes.health import SlotTokens
from actors.schedule.scheduler import QueueSizes
from quant.common.errors import StageLostError

if TYPE_CHECKING:
    from tests.actors.recovery.pretend import Cluster, Stage

STEP_S = 0.5  # of a token for every slot


class Leader:
    """The first stage's queue; a request takes a slot, and gets a token a step."""

    def __init__(self, cluster: Cluster, sizes: QueueSizes) -> None:
        self.cluster, self.sizes = cluster, sizes
        self.run = 0
        self.waiting: deque[Request] = deque()
        self.slots: dict[int, tuple[Request, list[int]]] = {}
        self.no_more = False

    def take(self, chunk: Chunk) -> None:
        if chunk.run != self.run:
            self.run, self.waiting, self.slots = chunk.run, deque(), {}
        self.waiting += chunk.requests
        self.no_more = chunk.last

    @property
    def wants_more(self) -> bool:
        empty = not self.waiting and (not self.slots or not self.no_more)
        return empty and (self.no_more or len(self.slots) < self.sizes.slots)

    def tokens(self) -> SlotTokens:
        held = {i: (r.custom_id, np.array(t)) for i, (r, t) in self.slots.items()}
        return SlotTokens(self.run or None, held)

    def step(self) -> tuple[Finished, ...]:
        for slot in range(self.sizes.slots):
            if slot not in self.slots and self.waiting:
                request = self.waiting.popleft()
                self.slots[slot] = request, list(request.generated)
        self._compute()
        ended: list[Finished] = []
        if self.cluster.is_broken() or self.cluster.is_waited_for():
            return ()  # it never came back
        for slot, (request, tokens) in list(self.slots.items()):
            tokens.append(100 * int(request.custom_id) + len(tokens))
            if len(tokens) == request.max_new_tokens:
                del self.slots[slot]
                ended.append(Finished(request.custom_id, tuple(tokens), "length"))
        self.cluster.steps += 1
        return tuple(ended)

    def _compute(self) -> None:
        """In micro-batches; the cluster may have one of them fail."""
        slots, size = sorted(self.slots), self.sizes.decode_micro_batch
        for first in range(0, len(slots), size):
            batch = tuple(slots[first : first + size])
            self.cluster.compute(batch, tuple(self.slots[slot][0].custom_id for slot in batch))


class Stream:
    """What comes of a chunk; `next` as of Ray's streams, ready when the next item is there."""

    def __init__(self, stage: Stage, leader: Leader, chunk: Chunk) -> None:
        self.stage, self.process, self.leader, self.chunk = stage, stage.process, leader, chunk
        self.begun = self.over = False
        self.items: deque[tuple[Finished, ...]] = deque()
        self.error: Exception | None = None
        self.next_s = 0.0

    @property
    def has_ended(self) -> bool:
        return self.over or self.error is not None

    def advance(self) -> None:
        cluster = self.stage.cluster
        if cluster.now_s >= self.process.dead_s:
            self.error = StageDiedError("stage 0's process died")
        elif self.process.leader is not self.leader or cluster.is_broken():
            self.error = StageLostError("a neighbour cannot be reached")
        elif not cluster.is_waited_for() and cluster.now_s >= self.next_s:
            self._compute(cluster)

    def _compute(self, cluster: Cluster) -> None:
        if not self.begun:
            self.begun = True
            self.leader.take(self.chunk)
        if self.leader.wants_more:
            self.over = True
            return
        self.next_s = cluster.now_s + STEP_S
        try:
            ended = self.leader.step()
        except StageLostError as error:
            self.error = error
            return
        if ended:
            self.items.append(ended)

    def is_ready(self) -> bool:
        return bool(self.items) or self.has_ended

    def __next__(self) -> Item:
        if not self.items and self.over:
            raise StopIteration
        if self.items:
            return Item(self.items.popleft())
        self.over = True
        return Item((), self.error)


@dataclass(frozen=True)
class Item:
    """An item of a stream, which is there: what finished, or the error that ended the stream."""

    finished: tuple[Finished, ...]
    error: Exception | None = None

    def is_ready(self) -> bool:
        return True

    def get(self) -> tuple[Finished, ...]:
        if self.error is not None:
            raise self.error
        return self.finished
