"""The first stage of a pretend cluster: its queue, and the stream of what it tells."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.logprobs import TokenLogprobs
from actors.messages import Finished, Progress, Request, SlotTokens
from actors.processes.answers import StageDiedError
from actors.schedule.live_run import Inbox, Mail
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

    def take(self, mail: Mail) -> None:
        gone = set(mail.cancelled)
        self.waiting += mail.requests
        self.waiting = deque(r for r in self.waiting if r.custom_id not in gone)
        self.slots = {i: s for i, s in self.slots.items() if s[0].custom_id not in gone}
        self.no_more = mail.closed

    @property
    def wants_more(self) -> bool:
        return not (self.no_more or self.waiting or len(self.slots) == self.sizes.slots)

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


class LiveStream:
    """What comes of a live run; `next` as of Ray's streams."""

    def __init__(
        self, stage: Stage, leader: Leader, inbox: Inbox, whole: bool, waits: bool
    ) -> None:
        self.stage, self.process, self.leader, self.inbox = stage, stage.process, leader, inbox
        self.whole, self.waits = whole, waits
        leader.run, leader.slots = inbox.run, {}
        leader.waiting.clear()
        self.asking: set[str] = set()
        self.over = self.has_asked = False
        self.items: deque[tuple[Any, ...]] = deque()
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
            self._step()

    def _step(self) -> None:
        leader, cluster = self.leader, self.stage.cluster
        mail = self.inbox.take(wait=False)
        leader.take(mail)
        self.asking |= {r.custom_id for r in mail.requests if r.top_logprobs is not None}
        if self.waits and leader.wants_more:
            if mail.requests or not self.has_asked:
                self.items.append(())
            self.has_asked = True
            return
        self.has_asked = False
        if not leader.waiting and not leader.slots:
            self.over = mail.closed
            return
        self.next_s = cluster.now_s + STEP_S
        steps = cluster.steps
        held = (*leader.waiting, *(request for request, _ in leader.slots.values()))
        came_with = {each.custom_id: len(each.generated) for each in held}
        try:
            ended = {each.custom_id: each for each in leader.step()}
        except StageLostError as error:
            self.error = error
            return
        if cluster.steps == steps:
            return
        if self.whole:
            whole = [
                self._with_logprobs(Progress(i, e.token_ids, e.finish_reason), came_with[i])
                for i, e in ended.items()
            ]
            self.items += [tuple(whole)] * bool(whole)
            return
        told = [Progress(r.custom_id, (tokens[-1],)) for r, tokens in leader.slots.values()]
        told += [Progress(i, e.token_ids[-1:], e.finish_reason) for i, e in ended.items()]
        self.items.append(tuple(map(self._with_logprobs, told)))

    def _with_logprobs(self, progress: Progress, came_with: int = 0) -> Progress:
        """That of token n is -n, where the request asks; not of those that it came with."""
        if progress.custom_id not in self.asking:
            return progress
        new = progress.token_ids[came_with:]
        return replace(progress, logprobs=tuple(TokenLogprobs(-n) for n in new))

    def is_ready(self) -> bool:
        return bool(self.items) or self.has_ended

    def __next__(self) -> Item:
        if self.items:
            return Item(self.items.popleft())
        if self.over:
            raise StopIteration
        self.over = True
        return Item((), self.error)


@dataclass(frozen=True)
class Item:
    """An item of a stream, which is there: what it tells, or the error that ended the stream."""

    told: tuple[Progress, ...]
    error: Exception | None = None

    def is_ready(self) -> bool:
        return True

    def get(self) -> tuple[Progress, ...]:
        if self.error is not None:
            raise self.error
        return self.told
