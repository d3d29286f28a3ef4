"""Learning beside a run: from mistakes, within its share of the time, and never for the worse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from llmpq.lengths.boosting import train_boosting
from llmpq.lengths.classifier import TuningOptions, from_nothing, train_classifier
from llmpq.lengths.learner import Learner, LearningLimits
from llmpq.lengths.predictor import BucketModel, Encoded, Example, Rest, buckets_of, likeliest
from tests.llmpq.lengths.learnable import BUCKETS, learnable, prompts_of, tokens_of

AT_ONCE = LearningLimits(share=1e6, least_mistakes=12)
DEADLINE_S = 600.0
"""Ends a test that hangs; says nothing of how fast a busy machine is."""


def wait_for(happened: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def trained(kind: str, count: int = 120) -> BucketModel:
    rows = learnable(count)
    if kind == "boosting":
        pytest.importorskip("sklearn")
        return train_boosting(prompts_of(rows), tokens_of(rows), BUCKETS, "any")
    start = from_nothing(BUCKETS, 256, "any")
    return train_classifier(prompts_of(rows), tokens_of(rows), start, TuningOptions(epochs=12))


def share_right(learner: Learner, rows: Sequence[Any]) -> float:
    """Predict rows and tell the learner how they ended; the share that was right."""
    encoded = learner.model.encode(prompts_of(list(rows)))
    found = likeliest(learner.model.probabilities(encoded))
    right = found == buckets_of(tokens_of(list(rows)), BUCKETS)
    for content, row, was_right in zip(encoded, rows, right.tolist(), strict=True):
        learner.finish(Example(content, row.tokens), was_right)
    return float(right.mean())


@pytest.mark.parametrize("kind", ["boosting", "classifier"])
def test_accuracy_recovers_after_answers_have_changed(kind: str) -> None:
    """What asked for long answers asks for short ones from some row on."""
    with closing(Learner(trained(kind), AT_ONCE)) as learner:
        assert share_right(learner, learnable(40, seed=1)) > 0.9
        for part in range(12):
            before = learner.learnt + learner.kept
            found = share_right(learner, learnable(40, seed=2 + part, turned=True))
            if part == 0:
                assert found < 0.6
            if found > 0.9:
                break
            if round(40 * (1 - found)) >= AT_ONCE.least_mistakes:
                wait_for(lambda done=before: learner.learnt + learner.kept > done)  # type: ignore[misc]
        assert found > 0.9
        assert learner.learnt
        assert learner.failure is None


@dataclass(frozen=True)
class Pretend:
    """A model that always takes one bucket, and what `improved` gives."""

    bucket: int
    better: Any = None
    work: Callable[[], None] = lambda: None
    steps: int = 1
    buckets: tuple[int, ...] = BUCKETS
    kind: str = "classifier"

    def probabilities(self, encoded: Sequence[Encoded]) -> Any:
        return np.tile(np.eye(len(BUCKETS))[self.bucket], (len(encoded), 1))

    def improved(self, examples: Sequence[Example], rest: Rest) -> Any:
        for _ in range(self.steps):
            self.work()
            rest()
        if isinstance(self.better, Exception):
            raise self.better
        return self.better


@contextmanager
def told(model: Pretend, limits: LearningLimits, tokens: int = 38) -> Iterator[Learner]:
    """A learner that has been told of enough answers of this length, all of them mistakes."""
    with closing(Learner(model, limits)) as learner:  # type: ignore[arg-type]
        for _ in range(limits.least_mistakes):
            learner.finish(Example(np.zeros(1), tokens), False)
        yield learner


def test_a_better_one_takes_over_and_begins_anew() -> None:
    better = Pretend(2)
    with told(Pretend(0, better), AT_ONCE) as learner:
        wait_for(lambda: learner.model is better)  # type: ignore[comparison-overlap]
        assert (learner.learnt, learner.kept) == (1, 0)


def test_one_that_is_no_better_does_not() -> None:
    first = Pretend(0, Pretend(1))
    with told(first, AT_ONCE) as learner:
        wait_for(lambda: learner.kept == 1)
        assert learner.model is first  # type: ignore[comparison-overlap]


def test_a_training_that_fails_leaves_the_predictor() -> None:
    first = Pretend(0, ValueError("no trees"))
    with told(first, AT_ONCE) as learner:
        wait_for(lambda: learner.failure is not None)
        assert learner.failure == "ValueError: no trees"
        assert learner.model is first  # type: ignore[comparison-overlap]


class Clock(threading.Event):
    """Goes on by steps of 2 ms that keep the processor busy, and by waits, which end at once."""

    now_s = busy_s = 0.0

    def work(self) -> None:
        self.now_s += 0.002
        self.busy_s += 0.002

    def wait(self, timeout: float | None = None) -> bool:
        self.now_s += timeout or 0.0
        return self.is_set()


def test_learning_keeps_to_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, steps = Clock(), 30
    monkeypatch.setattr("llmpq.lengths.learner._now_s", lambda: (clock.now_s, clock.busy_s))
    learning = Pretend(0, Pretend(2), clock.work, steps)
    with closing(Learner(learning, replace(AT_ONCE, share=0.1))) as learner:  # type: ignore[arg-type]
        learner._ended = clock
        for _ in range(AT_ONCE.least_mistakes):
            learner.finish(Example(np.zeros(1), 38), False)
        wait_for(lambda: learner.learnt == 1)
        assert learner.seconds == pytest.approx(steps * 0.002)
        assert clock.now_s == pytest.approx(steps * 0.02)


def test_an_end_does_not_wait_for_a_training() -> None:
    never = replace(AT_ONCE, share=1e-9)
    with told(Pretend(0, Pretend(2), steps=10**6), never):
        pass
    assert not [each for each in threading.enumerate() if each.name == "llmpq-learner"]


def test_few_rows_are_kept() -> None:
    limits = LearningLimits(share=1e-9, most_rows=10, least_mistakes=10**9)
    with closing(Learner(Pretend(0), limits)) as learner:  # type: ignore[arg-type]
        for number in range(1000):
            learner.finish(Example(np.zeros(1), 1 + number % 9), number % 2 == 0)
        assert len(learner._wrong) + len(learner._right) == 10
