"""Serving random requests, which come and are given up at any time, by some scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from actors.messages import Finished, MicroBatch, Request
from actors.schedule.scheduler import QueueSizes, Scheduler
from actors.schedule.table import make_scheduler
from tests.actors.schedule.token_pipeline import TokenPipeline, assert_right_tokens, request


@dataclass
class RandomServer:
    """Drives a scheduler with random events, and looks at it after each."""

    scheduler: Scheduler
    pipeline: TokenPipeline
    queue: QueueSizes
    rng: np.random.Generator
    cancels: float
    coming: deque[Request]
    under_way: deque[MicroBatch] = field(default_factory=deque)
    pool: dict[str, None] = field(default_factory=dict)  # requests that came, in their order
    finished: list[Finished] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls, stages: int, sizes: QueueSizes, requests: list[Request], seed: int, cancels: float
    ) -> Self:
        rng = np.random.default_rng(seed)
        outputs = {
            r.custom_id: int(rng.integers(len(r.generated) + 1, r.max_new_tokens + 1))
            for r in requests
        }
        pipeline = TokenPipeline(stages, sizes.kv_tokens, outputs)
        pipeline.expect(requests)
        scheduler = make_scheduler(sizes, stages)
        return cls(scheduler, pipeline, sizes, rng, cancels, deque(requests))

    @property
    def n_slots(self) -> int:
        return self.queue.n_slots or self.queue.kv_tokens

    def run(self) -> None:
        while self.coming or self.under_way or self.scheduler.waiting or self.scheduler.in_slots:
            draw = self.rng.random()
            if draw < self.cancels and self.pool:
                self.cancel(str(self.rng.choice(list(self.pool))))
            elif draw < 0.3 and self.coming:
                self.add([self.coming.popleft() for _ in range(min(3, len(self.coming)))])
            elif draw < 0.7 or not self.under_way:
                self.schedule()
            else:
                self.take_back()

    def add(self, requests: Sequence[Request]) -> None:
        self.scheduler.add(requests)
        self.pool.update(dict.fromkeys(each.custom_id for each in requests))

    def cancel(self, name: str) -> None:
        self.scheduler.cancel(name)
        self.cancelled.add(name)
        del self.pool[name]

    def schedule(self) -> None:
        if len(self.under_way) == self.scheduler.most_under_way:
            return
        following = self.scheduler.next_batch()
        if following is None:
            assert self.under_way or not self.scheduler.waiting, "nothing runs, and somebody waits"
            return
        self.under_way.append(self.pipeline.submit(*following))
        assert self.cancelled.isdisjoint(self.pipeline.names[-1])
        self.look(following[0])

    def look(self, batch: MicroBatch) -> None:
        """Look at what the policy has scheduled."""

    def take_back(self) -> None:
        batch = self.under_way.popleft()
        ended = self.scheduler.complete(batch, self.pipeline.result(batch))
        assert self.cancelled.isdisjoint(each.custom_id for each in ended)
        self.finished += ended
        for each in ended:
            del self.pool[each.custom_id]

    def check_end(self, requests: Sequence[Request]) -> None:
        """Hold what ended against what should have, and find every slot free."""
        left = [r for r in requests if r.custom_id not in self.cancelled]
        outputs = self.pipeline.outputs
        assert_right_tokens(self.finished, left, [outputs[r.custom_id] for r in left])
        assert self.scheduler.slot_tokens() == {}
        whole = request(len(requests), self.n_slots - 1, 1)
        self.scheduler.add([whole])
        batch = self.scheduler.next_batch()
        assert batch is not None, "token slots were lost"
        assert batch[0].admitted[0].room.size == self.n_slots
