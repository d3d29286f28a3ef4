"""What must hold of the policy `orca` whatever comes: order, reservations, and nothing is lost."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import Finished, MicroBatch, Request
from actors.schedule.orca import OrcaScheduler
from actors.schedule.scheduler import QueueSizes
from tests.actors.schedule.token_pipeline import (
    TokenPipeline,
    assert_right_tokens,
    request,
    sizes_of,
)


@dataclass
class Server:
    """Drives a scheduler with random events, and looks at it after each."""

    scheduler: OrcaScheduler
    pipeline: TokenPipeline
    n_slots: int
    rng: np.random.Generator
    cancels: float
    coming: deque[Request]
    under_way: deque[MicroBatch] = field(default_factory=deque)
    iterations: Counter[str] = field(default_factory=Counter)
    pool: dict[str, None] = field(default_factory=dict)  # requests that came, in their order
    finished: list[Finished] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)

    def run(self) -> None:
        while self.coming or self.under_way or self.scheduler.waiting or self.scheduler.in_slots:
            draw = self.rng.random()
            if draw < self.cancels and self.pool:
                self.cancel(str(self.rng.choice(list(self.pool))))
            elif draw < 0.3 and self.coming:
                part = [self.coming.popleft() for _ in range(min(3, len(self.coming)))]
                self.scheduler.add(part, last=False)
                self.pool.update(dict.fromkeys(each.custom_id for each in part))
            elif draw < 0.7 or not self.under_way:
                self.schedule()
            else:
                self.take_back()

    def cancel(self, name: str) -> None:
        self.scheduler.cancel(name)
        self.cancelled.add(name)
        del self.pool[name]

    def schedule(self) -> None:
        if len(self.under_way) == self.scheduler.most_under_way:
            return
        following = self.scheduler.next_batch()
        if following is None:
            return
        self.under_way.append(self.pipeline.submit(*following))
        self.iterations.update(self.pipeline.names[-1])
        assert self.cancelled.isdisjoint(self.pipeline.names[-1])
        ran = [self.iterations[name] for name in self.pool]
        assert ran == sorted(ran, reverse=True), "one that came later ran more iterations"

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
        self.scheduler.add([whole], last=True)
        batch = self.scheduler.next_batch()
        assert batch is not None, "token slots were lost"
        assert batch[0].admitted[0].room.size == self.n_slots


def server_of(
    stages: int, sizes: QueueSizes, requests: list[Request], seed: int, cancels: float
) -> Server:
    rng = np.random.default_rng(seed)
    outputs = {
        r.custom_id: int(rng.integers(len(r.generated) + 1, r.max_new_tokens + 1)) for r in requests
    }
    pipeline = TokenPipeline(stages, sizes.kv_tokens, outputs)
    pipeline.expect(requests)
    n_slots = sizes.n_slots or sizes.kv_tokens
    scheduler = OrcaScheduler(sizes, stages)
    return Server(scheduler, pipeline, n_slots, rng, cancels, deque(requests))


@settings(max_examples=150, deadline=None)
@given(
    stages=st.integers(1, 4),
    max_batch_size=st.integers(1, 5),
    lengths=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(0, 7)), max_size=40
    ),
    room=st.integers(20, 120),
    kept_back=st.integers(0, 15),
    chunk=st.integers(0, 5),
    cap=st.integers(0, 20),
    cancels=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 999),
)
def test_the_first_to_come_has_run_the_most_iterations(
    stages: int,
    max_batch_size: int,
    lengths: list[tuple[int, int, int]],
    room: int,
    kept_back: int,
    chunk: int,
    cap: int,
    cancels: float,
    seed: int,
) -> None:
    """With any bounds, parts of prompts, replayed tokens and cancelled requests."""
    requests = [request(i, p, n, min(g, n - 1)) for i, (p, n, g) in enumerate(lengths)]
    n_slots = max(20, room - kept_back)
    sizes = replace(sizes_of(stages, max_batch_size, room, chunk, cap), n_slots=n_slots)
    server = server_of(stages, sizes, requests, seed, cancels)
    server.run()
    if not server.cancelled:
        assert max(server.pipeline.n_rsrv, default=0) <= n_slots
    if cap:
        assert all(b.counts.sum() <= cap or len(b.slots) == 1 for b in server.pipeline.batches)
    if chunk:
        assert all(b.counts.max() <= chunk for b in server.pipeline.batches)
    server.check_end(requests)


def test_nothing_is_lost_over_ten_thousand_requests() -> None:
    rng = np.random.default_rng(3)
    lengths = zip(*rng.integers(1, 12, (2, 10_000)).tolist(), strict=True)
    requests = [request(i, p, n) for i, (p, n) in enumerate(lengths)]
    server = server_of(3, sizes_of(3, 16, 420), requests, 4, cancels=0.03)
    server.run()
    assert len(server.cancelled) > 300
    assert server.pipeline.moved > 1000
    server.check_end(requests)
