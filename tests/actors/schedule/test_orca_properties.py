"""What must hold of the policy `orca` whatever comes: order, reservations, and nothing is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import MicroBatch
from tests.actors.schedule.random_server import RandomServer
from tests.actors.schedule.token_pipeline import request, sizes_of


@dataclass
class Server(RandomServer):
    """A server that counts the iterations of each request."""

    iterations: Counter[str] = field(default_factory=Counter)

    def look(self, batch: MicroBatch) -> None:
        self.iterations.update(self.pipeline.names[-1])
        ran = [self.iterations[name] for name in self.pool]
        assert ran == sorted(ran, reverse=True), "one that came later ran more iterations"


@settings(max_examples=150)
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
    server = Server.of(stages, sizes, requests, seed, cancels)
    server.run()
    if not server.cancelled:
        assert max(server.pipeline.n_rsrv, default=0) <= n_slots
    if cap:
        assert all(b.counts.sum() <= cap or len(b.slots) == 1 for b in server.pipeline.batches)
    if chunk:
        assert all(b.counts.max() <= chunk for b in server.pipeline.batches)
    server.check_end(requests)


def test_nothing_is_lost_over_thousands_of_requests() -> None:
    rng = np.random.default_rng(3)
    lengths = zip(*rng.integers(1, 12, (2, 3000)).tolist(), strict=True)
    requests = [request(i, p, n) for i, (p, n) in enumerate(lengths)]
    server = Server.of(3, sizes_of(3, 16, 420), requests, 4, cancels=0.03)
    server.run()
    assert len(server.cancelled) > 90
    assert server.pipeline.moved > 300
    server.check_end(requests)
