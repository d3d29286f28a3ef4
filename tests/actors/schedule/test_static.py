"""The queue's scheduler, run against a pretend pipeline that counts and keeps a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from actors.messages import (
    Finished,
    FinishReason,
    MicroBatch,
    Request,
    Sampled,
    Sampling,
    TokenIds,
    TokenRange,
)
from actors.schedule.driver import PipelineDriver
from actors.schedule.scheduler import QueueSizes
from actors.schedule.static import StaticScheduler
from tests.actors.batches import SLOT_TOKENS, batch_in_ranges
from tests.actors.driving import drive, run_dry
from tests.seeds import seeds


@dataclass
class Seconds:
    """Of every stage, for a prefill and a decode micro-batch of any size."""

    prefill: Sequence[float]
    decode: Sequence[float]


class CountingPipeline:
    """Answers each request's i-th token with i and ends it after its own number of tokens.

    Checks on the way that a slot has one request at a time, that the tokens arrive in order at the
    right position, and that no decode group has two steps under way. The first stage computes
    within `submit`, as an actor's does; the others when what they need is there.
    """

    def __init__(
        self, seconds: Seconds, ends_after: dict[str, int], decode_micro_batch: int
    ) -> None:
        self.stages = len(seconds.decode)
        self.seconds = seconds
        self.under_way = self.most_under_way = 0
        self.batches: list[MicroBatch] = []
        self.now_s = 0.0
        self.busy: list[list[tuple[float, float]]] = []  # of every micro-batch, of every stage
        self._free_s = [0.0] * self.stages
        self._ends_after = ends_after
        self._size = decode_micro_batch
        self._holder: dict[int, str] = {}
        self._length: dict[int, int] = {}
        self._given: Counter[int] = Counter()
        self._stepping: set[int] = set()

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> tuple[MicroBatch, float]:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.batches.append(batch)
        self._check(batch, token_ids)
        return batch, self._compute(batch)

    def _check(self, batch: MicroBatch, token_ids: TokenIds) -> None:
        assert len(token_ids) == batch.counts.sum()
        assert batch.slots.tolist() == sorted(set(batch.slots.tolist()))
        assert batch.begins.tolist() == [slot * SLOT_TOKENS for slot in batch.slots.tolist()]
        for admission in batch.admitted:
            assert admission.slot not in self._holder
            assert admission.room == TokenRange(admission.slot * SLOT_TOKENS, SLOT_TOKENS)
            self._holder[admission.slot] = admission.custom_id
            self._length[admission.slot] = self._given[admission.slot] = 0
        if not batch.admitted:
            (group,) = {slot // self._size for slot in batch.slots.tolist()}
            assert group not in self._stepping
            self._stepping.add(group)
            assert token_ids.tolist() == [self._given[slot] for slot in batch.slots.tolist()]
        for slot, start, count in zip(batch.slots, batch.starts, batch.counts, strict=True):
            assert slot in self._holder
            assert start == self._length[slot]
            self._length[slot] = start + count

    def _compute(self, batch: MicroBatch) -> float:
        seconds = self.seconds.prefill if batch.admitted else self.seconds.decode
        at_s, spans = self.now_s, []
        for stage, taken_s in enumerate(seconds):
            began_s = max(at_s, self._free_s[stage])
            self._free_s[stage] = at_s = began_s + taken_s
            spans.append((began_s, at_s))
        self.busy.append(spans)
        self.now_s = spans[0][1]
        return at_s

    def result(self, handle: tuple[MicroBatch, float]) -> Sampled:
        batch, ready_s = handle
        self.now_s = max(self.now_s, ready_s)
        self.under_way -= 1
        if not batch.admitted:
            self._stepping.remove(int(batch.slots[0]) // self._size)
        reasons: list[FinishReason | None] = []
        for slot in batch.slots.tolist():
            self._given[slot] += 1
            ended = self._given[slot] == self._ends_after[self._holder[slot]]
            reasons.append("length" if ended else None)
        tokens = np.array([self._given[slot] for slot in batch.slots.tolist()], dtype=np.int64)
        for slot, reason in zip(batch.slots.tolist(), reasons, strict=True):
            if reason is not None:
                del self._holder[slot]
        return Sampled(tokens, tuple(reasons))

    def idle_s(self, stage: int, first: int, last: int) -> float:
        """Between the micro-batches `first` and `last`."""
        spans = [spans[stage] for spans in self.busy[first : last + 1]]
        return spans[-1][1] - spans[0][0] - sum(end - began for began, end in spans)


def requests(counts: Sequence[int]) -> list[Request]:
    return [
        Request(f"r{i}", tuple(range(3, 4 + i % 5)), count, Sampling())
        for i, count in enumerate(counts)
    ]


def pipeline_for(
    counts: Sequence[int], decode: int, seconds: Seconds | None = None, stages: int = 3
) -> CountingPipeline:
    seconds = seconds or Seconds([1.0] * stages, [1.0] * stages)
    return CountingPipeline(seconds, {f"r{i}": n for i, n in enumerate(counts)}, decode)


def run(
    counts: list[int], prefill: int, decode: int, stages: int = 3, slots: int | None = None
) -> tuple[CountingPipeline, list[Finished]]:
    pipeline = pipeline_for(counts, decode, stages=stages)
    scheduler = StaticScheduler(
        QueueSizes(slots or len(counts), prefill, decode, SLOT_TOKENS), stages
    )
    scheduler.add(requests(counts))
    finished = [f for batch in drive(scheduler, pipeline) for f in batch]
    return pipeline, finished


def first_decode(pipeline: CountingPipeline) -> int:
    return next(i for i, batch in enumerate(pipeline.batches) if not batch.admitted)


def last_prefill(pipeline: CountingPipeline) -> int:
    return max(i for i, batch in enumerate(pipeline.batches) if batch.admitted)


def assert_each_once(finished: Sequence[Finished], counts: Sequence[int]) -> None:
    assert sorted(f.custom_id for f in finished) == sorted(f"r{i}" for i in range(len(counts)))
    for each in finished:
        wanted = counts[int(each.custom_id[1:])]
        assert each.token_ids == tuple(range(1, wanted + 1))


@pytest.mark.parametrize(("prefill", "decode"), list(product([1, 2, 3, 5, 8], [1, 3, 4, 8])))
def test_every_request_gets_its_tokens_once(prefill: int, decode: int) -> None:
    counts = [1, 7, 3, 3, 9, 1, 2, 5]
    _, finished = run(counts, prefill, decode)
    assert_each_once(finished, counts)


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


def test_newcomers_take_the_slots_of_the_finished_and_join_their_group() -> None:
    """Two of four slots are free after the first step; one stage, so at most two are under way."""
    pipeline, _ = run([2, 5, 5, 2, 3, 3], prefill=2, decode=4, stages=1, slots=4)
    sizes = [(len(b.slots), bool(b.admitted)) for b in pipeline.batches]
    assert sizes[:4] == [(2, True), (2, True), (4, False), (2, True)]
    assert pipeline.batches[3].slots.tolist() == [0, 3]
    assert (4, False) in sizes[4:], "the newcomers step with those who were there"


def test_micro_batches_under_way_are_bounded() -> None:
    pipeline, _ = run([3] * 32, prefill=1, decode=1, stages=2)
    assert pipeline.most_under_way == 4


def fed(
    scheduler: StaticScheduler, pipeline: CountingPipeline, made: list[Request], chunk: int
) -> Iterator[Finished]:
    """As a live run that waits is fed: by chunks, whenever more are wanted."""
    for finished in run_dry(PipelineDriver(scheduler, pipeline), made, chunk):
        yield from finished


@pytest.mark.parametrize("seed", seeds(40, 120))
def test_queues_of_any_length_and_shape(seed: int) -> None:
    """Every id once, no slot used twice at once, one step per group: checked by the pipeline."""
    rng = np.random.default_rng(seed)
    slots, stages = int(rng.integers(1, 14)), int(rng.integers(1, 5))
    prefill, decode = (int(n) for n in rng.integers(1, slots + 1, size=2))
    counts = rng.integers(1, int(rng.integers(2, 12)), size=int(rng.integers(0, 60))).tolist()
    times = rng.uniform(0.1, 3.0, size=(2, stages))
    pipeline = pipeline_for(counts, decode, Seconds(times[0].tolist(), times[1].tolist()))
    scheduler = StaticScheduler(QueueSizes(slots, prefill, decode, SLOT_TOKENS), stages)
    finished = list(fed(scheduler, pipeline, requests(counts), int(rng.integers(1, 30))))
    assert_each_once(finished, counts)
    assert pipeline.under_way == 0
    assert max((len(b.slots) for b in pipeline.batches if b.admitted), default=0) <= prefill


@pytest.mark.parametrize("seed", seeds(20, 60))
def test_cancelled_requests_leave_and_the_others_get_their_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots, stages = int(rng.integers(1, 14)), int(rng.integers(1, 5))
    prefill, decode = (int(n) for n in rng.integers(1, slots + 1, size=2))
    counts = rng.integers(1, 12, size=40).tolist()
    scheduler = StaticScheduler(QueueSizes(slots, prefill, decode, SLOT_TOKENS), stages)
    scheduler.add(requests(counts))
    pipeline = CancellingPipeline(counts, decode, stages, scheduler, rng)
    finished = [each.custom_id for batch in drive(scheduler, pipeline) for each in batch]
    assert pipeline.cancelled
    assert len(finished) == len(set(finished))
    assert pipeline.cancelled.isdisjoint(finished)
    assert set(finished) | pipeline.cancelled == {f"r{i}" for i in range(40)}
    assert (scheduler.waiting, scheduler.in_slots, scheduler.slot_tokens()) == (0, 0, {})


class CancellingPipeline:
    """Ends requests after their number of tokens, and cancels some between its answers."""

    def __init__(
        self,
        counts: list[int],
        decode: int,
        stages: int,
        scheduler: StaticScheduler,
        rng: np.random.Generator,
    ) -> None:
        self.stages, self.cancelled = stages, set[str]()
        self._scheduler, self._rng, self._counts = scheduler, rng, counts
        self._holder: dict[int, int] = {}
        self._given: Counter[int] = Counter()
        self._ended: set[str] = set()

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> MicroBatch:
        assert len(token_ids) == batch.counts.sum()
        for admission in batch.admitted:
            assert admission.custom_id not in self.cancelled
            self._holder[admission.slot] = int(admission.custom_id[1:])
            self._given[admission.slot] = 0
        self._cancel()
        return batch

    def _cancel(self) -> None:
        name = f"r{self._rng.integers(len(self._counts))}"
        if name not in self._ended and self._rng.random() < 0.3:
            self._scheduler.cancel(name)
            self.cancelled.add(name)
            assert name not in {each for each, _ in self._scheduler.slot_tokens().values()}

    def result(self, handle: MicroBatch) -> Sampled:
        reasons: list[FinishReason | None] = []
        for slot in handle.slots.tolist():
            self._given[slot] += 1
            ends = self._given[slot] == self._counts[self._holder[slot]]
            reasons.append("length" if ends else None)
            if ends:
                self._ended.add(f"r{self._holder[slot]}")
        return Sampled(np.zeros(len(reasons), dtype=np.int64), tuple(reasons))


@pytest.mark.parametrize("chunk", [12, 17, 64])
def test_chunks_do_not_change_what_is_done(chunk: int) -> None:
    """As long as a chunk fills the slots."""
    counts = np.random.default_rng(0).integers(1, 9, size=64).tolist()
    whole, _ = run(counts, prefill=3, decode=4, slots=12)
    pipeline = pipeline_for(counts, 4)
    list(
        fed(
            StaticScheduler(QueueSizes(12, 3, 4, SLOT_TOKENS), 3), pipeline, requests(counts), chunk
        )
    )
    assert [b.slots.tolist() for b in pipeline.batches] == [b.slots.tolist() for b in whole.batches]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("groups_per_stage", [1, 2])
@pytest.mark.parametrize("lengths", ["equal", "random"])
@pytest.mark.parametrize("prefill", [1, 3, 4, 8])
def test_no_stage_rests_while_requests_wait(
    stages: int, groups_per_stage: int, lengths: str, prefill: int
) -> None:
    """Equal stages never, from their first micro-batch to the one that empties the queue."""
    groups, decode = stages * groups_per_stage, 4
    rng = np.random.default_rng(stages)
    count = 8 * groups * decode
    counts = [9] * count if lengths == "equal" else rng.integers(1, 20, size=count).tolist()
    pipeline = pipeline_for(counts, decode, stages=stages)
    scheduler = StaticScheduler(QueueSizes(groups * decode, prefill, decode, SLOT_TOKENS), stages)
    scheduler.add(requests(counts))
    list(drive(scheduler, pipeline))
    first, last = first_decode(pipeline), last_prefill(pipeline)
    for stage in range(stages):
        assert pipeline.idle_s(stage, first, last) == pytest.approx(0.0), stage


@pytest.mark.parametrize("slowest", range(3))
def test_the_slowest_stage_never_rests_while_requests_wait(slowest: int) -> None:
    seconds = [2.0 if stage == slowest else 1.0 for stage in range(3)]
    counts = np.random.default_rng(1).integers(1, 40, size=200).tolist()
    pipeline = pipeline_for(counts, 8, Seconds(seconds, seconds))
    scheduler = StaticScheduler(QueueSizes(24, 4, 8, SLOT_TOKENS), 3)
    scheduler.add(requests(counts))
    list(drive(scheduler, pipeline))
    idle_s = pipeline.idle_s(slowest, first_decode(pipeline), last_prefill(pipeline))
    assert idle_s == pytest.approx(0.0)


def seconds_of_queue(counts: Sequence[int], part: int) -> float:
    """On two stages, where a prefill takes four decode steps: `part` requests, a drain, and on."""
    pipeline = pipeline_for(counts, 8, Seconds([4.0] * 2, [1.0] * 2))
    made = requests(counts)
    for first in range(0, len(made), part):
        scheduler = StaticScheduler(QueueSizes(32, 8, 8, SLOT_TOKENS), 2)
        scheduler.add(made[first : first + part])
        list(drive(scheduler, pipeline))
    return pipeline.now_s


def test_equal_lengths_take_hardly_longer_than_a_stage_computes() -> None:
    computes_s = 40 * 4.0 + 320 / 8 * 49
    assert computes_s < seconds_of_queue([50] * 320, 320) < 1.01 * computes_s


def test_random_lengths_are_faster_than_one_global_batch_after_the_other() -> None:
    counts = np.random.default_rng(1).integers(1, 100, size=320).tolist()
    assert seconds_of_queue(counts, 320) < 0.8 * seconds_of_queue(counts, 32)


def test_decode_steps_stay_full_when_the_prefill_size_is_the_global_batch() -> None:
    """Waiting for 32 free slots would let the groups run down to their longest request."""
    counts = np.random.default_rng(2).integers(1, 100, size=400).tolist()
    pipeline, _ = run(counts, prefill=32, decode=16, stages=2, slots=32)
    last = last_prefill(pipeline)
    sizes = [len(b.slots) for b in pipeline.batches[:last] if not b.admitted]
    assert np.mean(sizes) > 0.8 * 16


def test_prefills_of_newcomers_take_turns_with_the_other_groups() -> None:
    """Group 0 ends as one; its four prefills have decode steps of group 1 between them."""
    counts = [3] * 4 + [40] * 4 + [3] * 8
    pipeline, _ = run(counts, prefill=1, decode=4, stages=1, slots=8)
    kinds = "".join("p" if b.admitted else "d" for b in pipeline.batches)
    assert kinds.startswith("p" * 8)
    assert "pp" not in kinds[8:]
    assert kinds[8:].count("p") == 8


def test_positions_and_last_rows_of_a_ragged_batch() -> None:
    batch = batch_in_ranges([4, 1, 2], [0, 5, 2], [3, 1, 2])
    assert batch.positions.tolist() == [0, 1, 2, 5, 2, 3]
    assert batch.last_token_rows.tolist() == [2, 3, 5]
