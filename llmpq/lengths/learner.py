"""A predictor learns from its mistakes beside a run (S³ section 3, supervisor).

A thread trains another predictor, which takes the place of the present one when it is done, and
only if it errs less on rows that neither has learnt from. Meanwhile the present one predicts.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmpq.lengths.folder import load_predictor, save_predictor
from llmpq.lengths.predictor import (
    BucketModel,
    Encoded,
    Example,
    Prompt,
    buckets_of,
    expected_tokens,
    likeliest,
)
from planner.assumed_predictor import predictor_file

MOST_AHEAD = 8192
"""Prompts that are remembered until their answers end, the latest ones: about 10 MB."""

LEAST_COUNTED = 64
"""Rows of the run that say more of how the predictor errs than those of its training."""

_NICENESS = 9
"""Added to that of the process, so that predictions come first."""

_CHECK_EVERY = 4
"""One row of so many is not learnt from: by these the old and the new predictor are compared."""


@dataclass(frozen=True)
class LearningLimits:
    """Bounds of learning: `share` of the time that it computes, at any time, as what it has not
    used is lost, and 1 or more does not bind it; rows that are kept to learn from; and mistakes
    after which it begins.
    """

    share: float = 0.03
    most_rows: int = 1024
    least_mistakes: int = 32


class _EndedError(Exception):
    """The process ends."""


def _now_s() -> tuple[float, float]:
    """The clock, and the processor's time that this thread has had."""
    return time.monotonic(), time.thread_time()


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
        self._rested_s = (0.0, 0.0)
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
        if self._limits.share < 1:
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
        self._rested_s = _now_s()
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
        (clock_s, busy_s), (rested_s, was_busy_s) = _now_s(), self._rested_s
        busy_s -= was_busy_s
        self.seconds += busy_s
        wait_s = busy_s / self._limits.share - (clock_s - rested_s)
        if self._ended.wait(max(0.0, wait_s)):
            raise _EndedError
        self._rested_s = _now_s()


def accuracy(model: BucketModel, examples: list[Example]) -> float:
    """Share of the rows whose bucket it tells; 1 of none."""
    if not examples:
        return 1.0
    found = likeliest(model.probabilities([each.encoded for each in examples]))
    true = buckets_of([each.tokens for each in examples], model.buckets)
    return float(np.mean(found == true))


class LearningPredictor:
    """Predicts with the predictor in `folder`, and improves it."""

    def __init__(self, folder: Path, learning: Mapping[str, Any]) -> None:
        model = load_predictor(folder)
        self._trained_confusion = np.array(predictor_file(folder).confusion)
        self._confusion = np.zeros_like(self._trained_confusion)
        self._learner = Learner(model, LearningLimits(**learning))
        self._ahead: OrderedDict[str, tuple[Encoded, int]] = OrderedDict()
        """What was predicted of prompts by id: how they are encoded, and their bucket."""
        self._prompts = 0
        self._seconds = 0.0
        self._began_s = time.monotonic()

    @property
    def model(self) -> BucketModel:
        return self._learner.model

    def answer(self, task: Mapping[str, Any]) -> dict[str, Any] | None:
        if "predict" in task:
            began_s = time.thread_time()
            expected = self._predict(task["predict"])
            self._seconds += time.thread_time() - began_s
            return {"expected": expected}
        if "finished" in task:
            self._finish(task["finished"])
            return None
        if "save" in task:
            self._save(Path(task["save"]))
            return {"saved": True}
        return {"figures": self._figures()}

    def _predict(self, rows: Sequence[tuple[str, int, list[int], str]]) -> list[int]:
        model = self.model
        prompts = [Prompt(name, limit, tuple(ids), text) for name, limit, ids, text in rows]
        encoded = model.encode(prompts)
        expected = expected_tokens(model, encoded, [each.limit for each in prompts])
        buckets = buckets_of(expected, model.buckets).tolist()
        for prompt, content, bucket in zip(prompts, encoded, buckets, strict=True):
            self._ahead[prompt.custom_id] = (content, bucket)
        while len(self._ahead) > MOST_AHEAD:
            self._ahead.popitem(last=False)
        self._prompts += len(prompts)
        return expected

    def _finish(self, rows: Sequence[tuple[str, int]]) -> None:
        for custom_id, tokens in rows:
            predicted = self._ahead.pop(custom_id, None)
            if predicted is None:
                continue
            encoded, expected = predicted
            bucket = int(buckets_of([tokens], self.model.buckets)[0])
            self._confusion[bucket, expected] += 1
            self._learner.finish(Example(encoded, tokens), bucket == expected)

    def _save(self, target: Path) -> None:
        """Write the present predictor, with how it erred in this run if that were enough rows."""
        counted = self._confusion.sum() >= LEAST_COUNTED
        confusion = self._confusion if counted else self._trained_confusion
        save_predictor(target, self.model, confusion, replace=True)

    def _figures(self) -> dict[str, Any]:
        learner = self._learner
        return {
            "prompts": self._prompts,
            "finished": int(self._confusion.sum()),
            "right": int(self._confusion.trace()),
            "predicting_s": self._seconds,
            "learning_s": learner.seconds,
            "learnt": learner.learnt,
            "kept": learner.kept,
            "failure": learner.failure,
            "elapsed_s": time.monotonic() - self._began_s,
        }
