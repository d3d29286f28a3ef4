"""The live run of a pretend cluster's first stage: a token for every slot a step."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actors.logprobs import TokenLogprobs
from actors.messages import Progress
from actors.processes.answers import StageDiedError
from actors.schedule.live import Inbox
from quant.common.errors import StageLostError
from tests.actors.recovery.pretend_leader import STEP_S, Item, Leader

if TYPE_CHECKING:
    from tests.actors.recovery.pretend import Stage


class LiveStream:
    """What comes of a live run; `next` as of Ray's streams."""

    def __init__(self, stage: Stage, leader: Leader, inbox: Inbox) -> None:
        self.stage, self.process, self.leader, self.inbox = stage, stage.process, leader, inbox
        leader.run, leader.slots = inbox.run, {}
        leader.waiting.clear()
        self.asking: set[str] = set()
        self.over = False
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
        gone = set(mail.cancelled)
        leader.waiting = deque(r for r in leader.waiting if r.custom_id not in gone)
        leader.slots = {i: s for i, s in leader.slots.items() if s[0].custom_id not in gone}
        leader.waiting += [each for each in mail.requests if each.custom_id not in gone]
        self.asking |= {r.custom_id for r in mail.requests if r.top_logprobs is not None}
        if not leader.waiting and not leader.slots:
            self.over = mail.closed
            return
        self.next_s = cluster.now_s + STEP_S
        steps = cluster.steps
        try:
            ended = {each.custom_id: each for each in leader.step()}
        except StageLostError as error:
            self.error = error
            return
        if cluster.steps == steps:
            return
        told = [Progress(r.custom_id, (tokens[-1],)) for r, tokens in leader.slots.values()]
        told += [Progress(i, e.token_ids[-1:], e.finish_reason) for i, e in ended.items()]
        self.items.append(tuple(map(self._with_logprobs, told)))

    def _with_logprobs(self, progress: Progress) -> Progress:
        """That of token n is -n, where the request asks."""
        if progress.custom_id not in self.asking:
            return progress
        return replace(progress, logprobs=tuple(TokenLogprobs(-n) for n in progress.token_ids))

    def is_ready(self) -> bool:
        return bool(self.items) or self.has_ended

    def __next__(self) -> Item:
        if self.items:
            return Item(self.items.popleft())
        if self.over:
            raise StopIteration
        self.over = True
        return Item((), self.error)
