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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmpq.lengths.learner import LearningPredictor

NICENESS = 10
"""Stages come first; what is left of the processors is enough for a small model."""


def _loaded(settings: Mapping[str, Any]) -> tuple[LearningPredictor | None, dict[str, Any]]:
    from llmpq.lengths.learner import LearningPredictor

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
