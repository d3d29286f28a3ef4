"""Contestants of the benchmark of lengths in virtual time: memory, ends, what they are told."""

from __future__ import annotations

import numpy as np
import pytest

from actors.schedule.s3 import S3Scheduler
from actors.schedule.scheduler import QueueSizes
from benchmarks.reproduction.lengths.on_demand import BLOCK_TOKENS, OnDemandScheduler
from benchmarks.reproduction.lengths.rows import Rows, confusion_of, tenths
from benchmarks.reproduction.lengths.virtual_job import CacheCosts, run_job
from planner.plan.modelled_times import ModelledTimes

LIMIT = 100
TIMES = ModelledTimes.constant(0.05, 0.01)
FREE = CacheCosts(0.0, 0.0)


def some_rows(count: int, seed: int = 0) -> Rows:
    draw = np.random.default_rng(seed)
    prompts, answers = draw.integers(1, 40, count), draw.integers(1, LIMIT + 1, count)
    return Rows("some", prompts, answers, LIMIT, tenths(LIMIT))


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("kv_tokens", [160, 400, 4000])
def test_blocks_on_demand_are_never_more_than_there_are(stages: int, kv_tokens: int) -> None:
    """Little memory takes preemption, much takes none; every answer has its length (`run_job`)."""
    scheduler = OnDemandScheduler(kv_tokens, stages, 8, 200)
    used: list[int] = []
    next_batch = scheduler.next_batch

    def noted() -> object:
        found = next_batch()
        held = sum(each.blocks for each in scheduler._running.values())
        tokens = sum(-(-each.written // BLOCK_TOKENS) for each in scheduler._running.values())
        assert held + scheduler._free == kv_tokens // BLOCK_TOKENS
        assert tokens == held
        used.append(held)
        return found

    scheduler.next_batch = noted  # type: ignore[method-assign,assignment]
    run = run_job(scheduler, [TIMES] * stages, some_rows(60), None, FREE)
    assert max(used) <= kv_tokens // BLOCK_TOKENS
    assert (run.preemptions > 0) == (kv_tokens < 4000)
    assert run.computed_again >= run.preemptions


def test_copies_and_moves_take_their_seconds() -> None:
    """A run whose copies cost a second a token is longer by just those seconds."""
    rows = some_rows(60)
    runs = []
    for costs in (FREE, CacheCosts(move_s=1.0, park_s=1.0)):
        sizes = QueueSizes(16, 1, 16, 140, "s3-published", 400, 380, 16, 200, 0, 1, 10_000)
        runs.append(run_job(S3Scheduler(sizes, 1), [TIMES], rows, np.ones(60, np.int64), costs))
    free, dear = runs
    assert free.parked == dear.parked > 0
    assert dear.seconds == pytest.approx(free.seconds + dear.parked + dear.moved)


@pytest.mark.parametrize("answer", [1, 7, 30])
def test_a_row_alone_has_its_tokens_as_fast_as_steps_are(answer: int) -> None:
    lengths = np.array([20]), np.array([answer])
    rows = Rows("one", *lengths, LIMIT, tenths(LIMIT))
    run = run_job(OnDemandScheduler(400, 1, 8, 200), [TIMES], rows, None, FREE)
    assert run.token_s == pytest.approx([(0.05 + 0.01 * (answer - 1)) / answer])


@pytest.mark.parametrize("near", [0.0, 1.0])
@pytest.mark.parametrize("accuracy", [1.0, 0.7, 0.1])
def test_predictions_are_as_right_as_their_confusion_matrix(accuracy: float, near: float) -> None:
    rows = some_rows(20_000)
    confusion = confusion_of(accuracy, near)
    assert confusion.sum(axis=1) == pytest.approx(np.ones(10))
    expected = rows.expected_by(confusion, seed=1)
    assert rows.accuracy(expected) == pytest.approx(accuracy, abs=0.02)
    wrong = rows.bucket_of(expected) != rows.bucket_of(rows.answers)
    distance = np.abs(rows.bucket_of(expected) - rows.bucket_of(rows.answers))[wrong]
    if near:
        assert (distance == 1).all()
    elif wrong.any():
        assert distance.mean() > 2
