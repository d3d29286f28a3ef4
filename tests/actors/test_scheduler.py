"""The static-batch policy, run against a pretend pipeline that counts."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest

from actors.messages import FinishReason, MicroBatch, Request, Sampled, Sampling, TokenIds
from actors.pipeline import drive
from actors.scheduler import StaticBatchScheduler


class CountingPipeline:
    """Answers each request's i-th token with i and ends it after its own number of tokens.

    Checks on the way that every request's tokens arrive in order, at the right position of its
    slot.
    """

    def __init__(self, stages: int, requests: list[Request]) -> None:
        self.stages = stages
        self.under_way = self.most_under_way = 0
        self.batches: list[MicroBatch] = []
        self._lengths: dict[int, int] = {}
        self._given: Counter[int] = Counter()
        self._wanted = {slot: r.max_new_tokens for slot, r in enumerate(requests)}

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> MicroBatch:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.batches.append(batch)
        assert len(token_ids) == batch.counts.sum()
        for slot, start, count in zip(batch.slots, batch.starts, batch.counts, strict=True):
            assert start == self._lengths.get(slot, 0)
            self._lengths[slot] = start + count
        return batch

    def result(self, handle: MicroBatch) -> Sampled:
        self.under_way -= 1
        reasons: list[FinishReason | None] = []
        for slot in handle.slots.tolist():
            self._given[slot] += 1
            reasons.append("length" if self._given[slot] == self._wanted[slot] else None)
        tokens = np.array([self._given[s] for s in handle.slots.tolist()], dtype=np.int64)
        return Sampled(tokens, tuple(reasons))


def requests(counts: list[int]) -> list[Request]:
    return [
        Request(f"r{i}", tuple(range(3, 4 + i % 5)), count, Sampling())
        for i, count in enumerate(counts)
    ]


def run(counts: list[int], prefill: int, decode: int, stages: int = 3) -> tuple[Any, Any]:
    made = requests(counts)
    pipeline = CountingPipeline(stages, made)
    scheduler = StaticBatchScheduler(made, prefill, decode)
    finished = [f for batch in drive(scheduler, pipeline) for f in batch]
    return pipeline, finished


@pytest.mark.parametrize(("prefill", "decode"), list(product([1, 2, 3, 5, 8], [1, 3, 4, 8])))
def test_every_request_gets_its_tokens_once(prefill: int, decode: int) -> None:
    counts = [1, 7, 3, 3, 9, 1, 2, 5]
    _, finished = run(counts, prefill, decode)
    assert {f.custom_id: len(f.token_ids) for f in finished} == {
        f"r{i}": n for i, n in enumerate(counts)
    }
    assert all(f.token_ids == tuple(range(1, len(f.token_ids) + 1)) for f in finished)
    assert len(finished) == len(counts)


def test_micro_batches_have_the_planned_sizes() -> None:
    pipeline, _ = run([4] * 8, prefill=2, decode=4)
    prefills = [b for b in pipeline.batches if b.admitted]
    decodes = [b for b in pipeline.batches if not b.admitted]
    assert [len(b.slots) for b in prefills] == [2, 2, 2, 2]
    assert {len(b.slots) for b in decodes} == {4}
    assert len(decodes) == 2 * 3
    assert all(b.is_decode for b in decodes)
    assert not any(b.is_decode for b in prefills)


def test_finished_requests_leave_their_micro_batch() -> None:
    pipeline, _ = run([2, 5, 5, 2], prefill=4, decode=4)
    assert [len(b.slots) for b in pipeline.batches] == [4, 4, 2, 2, 2]


def test_micro_batches_under_way_are_bounded() -> None:
    pipeline, _ = run([3] * 32, prefill=1, decode=1, stages=2)
    assert pipeline.most_under_way == 4


def test_positions_and_last_rows_of_a_ragged_batch() -> None:
    batch = MicroBatch(np.array([4, 1, 2]), np.array([0, 5, 2]), np.array([3, 1, 2]))
    assert batch.positions.tolist() == [0, 1, 2, 5, 2, 3]
    assert batch.last_token_rows.tolist() == [2, 3, 5]
