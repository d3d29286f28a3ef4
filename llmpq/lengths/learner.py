"""A predictor learns from its mistakes beside a run (S³ section 3, supervisor).

A thread trains another predictor, which takes the place of the present one when it is done, and
only if it errs less on rows that neither has learnt from. Meanwhile the present one predicts.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from llmpq.lengths.predictor import BucketModel, Example, buckets_of, likeliest

_NICENESS = 9
"""Added to that of the process, so that predictions come first."""

_CHECK_EVERY = 4
"""One row of so many is not learnt from: by these the old and the new predictor are compared."""


@dataclass(frozen=True)
class LearningLimits:
    """Bounds of learning: `share` of the time that it computes, at any time, as what it has not
    used is lost; rows that are kept to learn from; and mistakes after which it begins.
    """

    share: float = 0.03
    most_rows: int = 1024
    least_mistakes: int = 32


class _EndedError(Exception):
    """The process ends."""


class _Moment(NamedTuple):
    """The clock, and the processor's time that this thread has had."""

    clock_s: float
    busy_s: float

    @classmethod
    def present(cls) -> _Moment:
        return cls(time.monotonic(), time.thread_time())


class Learner:
    """Holds the present predictor in `model`, and improves it by the rows it is told of.

    `learnt` counts how often another one took its place, `kept` how often the old one erred less;
    `seconds` is the processor's time that learning took.
    """

    def __init__(self, model: BucketModel, limits: LearningLimits) -> None:
        self.model = model
        self.learnt = self.kept = 0
        self.seconds = 0.0
        self.failure: str | None = None
        self._limits = limits
        self._rested = _Moment(0.0, 0.0)
        self._wrong: deque[Example] = deque(maxlen=limits.most_rows // 2)
        self._right: deque[Example] = deque(maxlen=limits.most_rows // 2)
        self._mistakes = 0
        self._condition = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmpq-learner", daemon=True)
        self._thread.start()

    def finish(self, example: Example, was_right: bool) -> None:
        """Keep a row whose answer has ended."""
        with self._condition:
            (self._right if was_right else self._wrong).append(example)
            self._mistakes += not was_right
            if self._mistakes >= self._limits.least_mistakes:
                self._condition.notify()

    def close(self) -> None:
        """End a training that goes on, for good."""
        self._ended.set()
        with self._condition:
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError):
            os.nice(_NICENESS)  # of this thread alone, as Linux has it
        if self.model.kind == "boosting":
            with suppress(ImportError):  # while stages still load; a training says what is missing
                import sklearn.ensemble  # noqa: F401
        with suppress(_EndedError):
            while True:
                self._learn(*self._rows())

    def _rows(self) -> tuple[list[Example], list[Example]]:
        """Wait for enough mistakes; the rows to learn from, and those to compare by."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._ended.is_set() or self._mistakes >= self._limits.least_mistakes
            )
            if self._ended.is_set():
                raise _EndedError
            self._mistakes = 0
            wrong, right = list(self._wrong), list(self._right)
        check = wrong[::_CHECK_EVERY] + right[::_CHECK_EVERY]
        learn = [
            each for rows in (right, wrong) for at, each in enumerate(rows) if at % _CHECK_EVERY
        ]
        return learn, check

    def _learn(self, learn: list[Example], check: list[Example]) -> None:
        """Train another predictor, and let it take over if it errs less."""
        self._rested = _Moment.present()
        try:
            other = self.model.improved(learn, self._rest)
            self._rest()
            better = accuracy(other, check) > accuracy(self.model, check)
        except _EndedError:
            raise
        except Exception as error:  # predictions go on with the one there is
            self.failure = f"{type(error).__name__}: {error}"
            raise _EndedError from error
        if better:
            self.model = other
            self.learnt += 1
            with self._condition:
                self._wrong.clear()
                self._right.clear()
        else:
            self.kept += 1
        self._rest()

    def _rest(self) -> None:
        """Wait until what was computed since the last rest is its share of the time."""
        now = _Moment.present()
        busy_s = now.busy_s - self._rested.busy_s
        self.seconds += busy_s
        wait_s = busy_s / self._limits.share - (now.clock_s - self._rested.clock_s)
        if self._ended.wait(max(0.0, wait_s)):
            raise _EndedError
        self._rested = _Moment.present()


def accuracy(model: BucketModel, examples: list[Example]) -> float:
    """Share of the rows whose bucket it tells; 1 of none."""
    if not examples:
        return 1.0
    found = likeliest(model.probabilities([each.encoded for each in examples]))
    true = buckets_of([each.tokens for each in examples], model.buckets)
    return float(np.mean(found == true))
