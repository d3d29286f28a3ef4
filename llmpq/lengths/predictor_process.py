"""The driver's side of the process that predicts: prompts in, expected tokens out.

The job depends on none of it: a process that ends, takes too long or answers nonsense is given up,
and every prompt from then on is expected to get the longest answer that it may have.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmpq.lengths import predictor_child
from llmpq.lengths.learner import LearningLimits
from llmpq.lengths.predictor import Longest, Prompt
from llmpq.tokenizing.child_process import ChildEndedError, JsonChild
from quant.common.errors import InputError, SpecError

BATCH_S = 60.0
"""Seconds for a batch of prompts: 16 of 256 tokens take DistilBERT 2.8 on a free core, and many
times that at a low priority beside busy stages."""

LOAD_S = 120.0
SAVE_S = 60.0


@dataclass(frozen=True)
class PredictorLimits:
    """Seconds for a batch of prompts, and bounds of learning."""

    batch_s: float = BATCH_S
    learning: LearningLimits = field(default_factory=LearningLimits)


@dataclass(frozen=True)
class PredictionFigures:
    """What a predictor has done in a run: `right` of `finished` answers were of the bucket that was
    predicted. `predicting_s` and `learning_s` are the processor's seconds, of `elapsed_s` of the
    clock; `learnt`: how often an improved one took over, `kept`: how often that was no better.
    `failure`: why it learns no more.
    """

    prompts: int
    finished: int
    right: int
    predicting_s: float
    learning_s: float
    learnt: int
    kept: int
    failure: str | None
    elapsed_s: float


class PredictorProcess:
    """Predicts with the predictor in `folder`, one task after the other in a thread of its own.

    `failure` tells why it has been given up, None while it has not. `reads_ids` and `reads_text`:
    what prompts must bring; known when `wait` returns.
    """

    def __init__(
        self,
        folder: Path,
        limits: PredictorLimits | None = None,
        program: Path = Path(predictor_child.__file__),
    ) -> None:
        self.failure: str | None = None
        self.reads_ids = self.reads_text = False
        self._folder = folder
        self._limits = limits or PredictorLimits()
        self._lines: list[bytes] = []
        settings = {"folder": str(folder.resolve()), "learning": asdict(self._limits.learning)}
        self._child = JsonChild(program, settings, "predicts lengths")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llmpq-lengths")
        self._loaded = self._thread.submit(self._next_answer, LOAD_S, "loading")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    def wait(self) -> None:
        """Wait until it is loaded; SpecError where it cannot be."""
        first = self._loaded.result()
        if "error" in first:
            self.close()
            raise SpecError(f"the predictor in {self._folder} cannot be loaded: {first['error']}")
        self.reads_ids, self.reads_text = first["reads_ids"], first["reads_text"]

    def submit(self, prompts: Sequence[Prompt]) -> Future[list[int]]:
        """Begin to predict; the result has the expected tokens of each prompt, always."""
        return self._thread.submit(self._predict, tuple(prompts))

    def finished(self, rows: Sequence[tuple[str, int]]) -> None:
        """Tell how many tokens answers have got that have ended, by `custom_id`."""
        if rows and self.failure is None:
            self._thread.submit(self._send, {"finished": list(rows)})

    def figures(self) -> PredictionFigures | None:
        """What it has done so far; None where it has been given up."""
        answer = self._thread.submit(self._asked, {"figures": True}, self._limits.batch_s).result()
        return None if answer is None else PredictionFigures(**answer["figures"])

    def save(self, target: Path) -> None:
        """Write the predictor as it is to the folder `target`; raises `InputError`."""
        task = {"save": str(target.absolute())}
        if self._thread.submit(self._asked, task, SAVE_S, "writing").result() is None:
            raise InputError(f"the predictor is not written to {target}: {self.failure}")

    def close(self) -> None:
        """End the process; what was not answered is expected to be longest."""
        self.failure = self.failure or "it was ended"
        self._child.kill()  # a task that goes on finds its pipes at their ends
        self._thread.shutdown(wait=True, cancel_futures=False)
        self._child.end()

    def _predict(self, prompts: tuple[Prompt, ...]) -> list[int]:
        rows = [
            (
                each.custom_id,
                each.limit,
                each.token_ids if self.reads_ids else (),
                each.text if self.reads_text else "",
            )
            for each in prompts
        ]
        answer = self._asked({"predict": rows}, self._limits.batch_s)
        expected = None if answer is None else self._checked(answer.get("expected"), prompts)
        return Longest().expect(prompts) if expected is None else expected

    def _checked(self, expected: Any, prompts: Sequence[Prompt]) -> list[int] | None:
        """The expected tokens, unless they are none."""
        if (
            isinstance(expected, list)
            and len(expected) == len(prompts)
            and all(
                type(tokens) is int and 1 <= tokens <= each.limit
                for tokens, each in zip(expected, prompts, strict=True)
            )
        ):
            return expected
        self._give_up(f"it answered {expected!r:.80}, which are no lengths")
        return None

    def _send(self, task: Mapping[str, Any]) -> None:
        if self.failure is None:
            self._child.send(json.dumps(task).encode() + b"\n")
            self._child.write()

    def _asked(
        self, task: Mapping[str, Any], limit_s: float, of: str = "a batch"
    ) -> dict[str, Any] | None:
        """The answer to a task, None where there is none any more."""
        if self.failure is not None:
            return None
        self._send(task)
        answer = self._next_answer(limit_s, of)
        if "error" in answer:
            self._give_up(str(answer["error"]))
            return None
        return answer

    def _next_answer(self, limit_s: float, of: str) -> dict[str, Any]:
        """The next line that the process writes, or the `error` why there is none."""
        deadline_s = time.monotonic() + limit_s
        try:
            while not self._lines:
                self._lines += self._child.exchange(deadline_s - time.monotonic())
        except TimeoutError:
            return {"error": f"it took more than {limit_s:g} s for {of}"}
        except ChildEndedError as error:
            return {"error": str(error)}
        line = self._lines.pop(0)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        return answer if isinstance(answer, dict) else {"error": f"it answered {line[:80]!r}"}

    def _give_up(self, why: str) -> None:
        self.failure = self.failure or why
        self._child.end()
