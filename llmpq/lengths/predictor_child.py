"""The process of a predictor: predicts, and learns from what has ended, at a low priority.

It is started by the path of this file. Its settings come as JSON in its only argument, tasks as one
JSON object a line: `{"predict": [[id, limit, ids, text], …]}` is answered by `expected`,
`{"finished": [[id, tokens], …]}` by nothing, `{"save": folder}` by `saved`, `{"figures": true}` by
`figures`; any by the `error` that it met. The first line that it writes tells what it reads
(`reads_ids`, `reads_text`), or the `error` for which it cannot be loaded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmpq.lengths.predictor import BucketModel, Encoded

NICENESS = 10
"""Stages come first; what is left of the processors is enough for a small model."""

MOST_AHEAD = 8192
"""Prompts that are remembered until their answers end, the latest ones: about 10 MB."""

LEAST_COUNTED = 64
"""Rows of the run that say more of how the predictor errs than those of its training."""


@dataclass(frozen=True)
class _Predicted:
    encoded: Encoded
    bucket: int


class LearningPredictor:
    """Predicts with the predictor in `folder`, and improves it."""

    def __init__(self, folder: Path, learning: Mapping[str, Any]) -> None:
        import numpy as np

        from llmpq.lengths.folder import load_predictor
        from llmpq.lengths.learner import Learner, LearningLimits
        from planner.assumed_predictor import predictor_file

        model = load_predictor(folder)
        self._trained_confusion = np.array(predictor_file(folder).confusion)
        self._confusion = np.zeros_like(self._trained_confusion)
        self._learner = Learner(model, LearningLimits(**learning))
        self._ahead: OrderedDict[str, _Predicted] = OrderedDict()
        self._prompts = 0
        self._seconds = 0.0
        self._began_s = time.monotonic()

    @property
    def model(self) -> BucketModel:
        """The present predictor."""
        return self._learner.model

    def answer(self, task: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer to a task; None for one that has none."""
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
        from llmpq.lengths.predictor import Bucketed, Prompt, buckets_of

        model = self.model
        prompts = [Prompt(name, limit, tuple(ids), text) for name, limit, ids, text in rows]
        encoded = model.encode(prompts)
        limits = [each.limit for each in prompts]
        expected = Bucketed(model).expect_encoded(encoded, limits)
        buckets = buckets_of(expected, model.buckets).tolist()
        for prompt, content, bucket in zip(prompts, encoded, buckets, strict=True):
            self._ahead[prompt.custom_id] = _Predicted(content, bucket)
        while len(self._ahead) > MOST_AHEAD:
            self._ahead.popitem(last=False)
        self._prompts += len(prompts)
        return expected

    def _finish(self, rows: Sequence[tuple[str, int]]) -> None:
        from llmpq.lengths.predictor import Example, buckets_of

        for custom_id, tokens in rows:
            predicted = self._ahead.pop(custom_id, None)
            if predicted is None:
                continue
            bucket = int(buckets_of([tokens], self.model.buckets)[0])
            self._confusion[bucket, predicted.bucket] += 1
            example = Example(predicted.encoded, tokens)
            self._learner.finish(example, bucket == predicted.bucket)

    def _save(self, target: Path) -> None:
        """Write the present predictor, with how it erred in this run if that were enough rows."""
        from llmpq.lengths.folder import save_predictor

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


def _loaded(settings: Mapping[str, Any]) -> tuple[LearningPredictor | None, dict[str, Any]]:
    try:
        predictor = LearningPredictor(Path(settings["folder"]), settings["learning"])
    except Exception as error:  # told to the process that asked
        return None, {"error": str(error) or type(error).__name__}
    model = predictor.model
    return predictor, {"reads_ids": model.tokenizer is not None, "reads_text": model.reads_text}


def import_rooms_alone(root: Path) -> None:
    """Let rooms of the llmpq in `root` be imported without what `llmpq/__init__.py` imports for its
    users: planning, with its solvers, takes a second and some memory.
    """
    sys.path.insert(0, str(root))
    package = ModuleType("llmpq")
    package.__path__ = [str(root / "llmpq")]
    sys.modules["llmpq"] = package


def serve(settings: Mapping[str, Any]) -> None:
    """Load, then answer until there are no more tasks."""
    channel = os.dup(1)
    os.dup2(2, 1)  # prints of libraries are no answers

    def send(content: Mapping[str, Any]) -> None:
        left = memoryview(json.dumps(content).encode() + b"\n")
        while left:
            left = left[os.write(channel, left) :]

    predictor, first = _loaded(settings)
    send(first)
    if predictor is None:
        return
    for line in sys.stdin:
        try:
            answer = predictor.answer(json.loads(line))
        except Exception as error:  # as in `_loaded`
            answer = {"error": f"{type(error).__name__}: {error}"}
        if answer is not None:
            send(answer)


if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
    os.nice(NICENESS)
    os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported
    import_rooms_alone(Path(__file__).resolve().parents[2])
    with suppress(BrokenPipeError):  # the process that asked has ended
        serve(json.loads(sys.argv[1]))
    os._exit(0)  # a training that goes on is not waited for
