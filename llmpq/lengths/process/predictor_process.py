"""The driver's side of the process that predicts: prompts in, expected tokens out.

The job depends on none of it: a process that ends, takes too long or answers nonsense is given up,
and every prompt from then on is expected to get the longest answer that it may have.
"""

from __future__ import annotations

import json
import os
import select
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmpq.lengths.predictor import Longest, Prompt
from llmpq.lengths.process import worker
from llmpq.lengths.process.learner import LearningLimits
from llmpq.tokenizing.child_process import end_child, pipes_of, start_child
from quant.common.errors import InputError, SpecError

BATCH_S = 60.0
"""Seconds for a batch of prompts: 16 of 256 tokens take DistilBERT 2.8 on a free core, and many
times that at a low priority beside busy stages."""

LOAD_S = 120.0
SAVE_S = 60.0
_PIPE_BYTES = 1 << 16


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


class _GivenUpError(Exception):
    """The process does not do what it should."""


class PredictorProcess:
    """Predicts with the predictor in `folder`, one task after the other in a thread of its own.

    `failure` tells why it has been given up, None while it has not. `reads_ids` and `reads_text`:
    what prompts must bring; known when `wait` returns.
    """

    def __init__(
        self,
        folder: Path,
        limits: PredictorLimits | None = None,
        program: Path = Path(worker.__file__),
    ) -> None:
        self.failure: str | None = None
        self.reads_ids = self.reads_text = False
        self._folder = folder
        self._limits = limits or PredictorLimits()
        self._incoming = bytearray()
        settings = {"folder": str(folder.resolve()), "learning": asdict(self._limits.learning)}
        process = start_child(program, settings, "predicts lengths")
        self._process = process
        self._in, self._out = pipes_of(process)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llmpq-lengths")
        self._end = weakref.finalize(self, end_child, process)
        self._loaded = self._thread.submit(self._read, time.monotonic() + LOAD_S)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait(self) -> None:
        """Wait until it is loaded; SpecError where it cannot be."""
        try:
            first = self._loaded.result()
        except _GivenUpError as error:
            first = {"error": str(error)}
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
            self._thread.submit(self._tell, {"finished": list(rows)})

    def figures(self) -> PredictionFigures | None:
        """What it has done so far; None where it has been given up."""
        answer = self._thread.submit(self._asked, {"figures": True}, self._limits.batch_s).result()
        return None if answer is None else PredictionFigures(**answer["figures"])

    def save(self, target: Path) -> None:
        """Write the predictor as it is to the folder `target`; raises `InputError`."""
        task = {"save": str(target.absolute())}
        if self._thread.submit(self._asked, task, SAVE_S).result() is None:
            raise InputError(f"the predictor is not written to {target}: {self.failure}")

    def close(self) -> None:
        """End the process; what was not answered is expected to be longest."""
        self.failure = self.failure or "it was ended"
        self._process.kill()  # a task that goes on finds its pipes at their ends
        self._thread.shutdown(wait=True, cancel_futures=False)
        self._end()

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

    def _tell(self, task: Mapping[str, Any]) -> None:
        if self.failure is None:
            try:
                self._write(task, time.monotonic() + self._limits.batch_s)
            except _GivenUpError as error:
                self._give_up(str(error))

    def _asked(self, task: Mapping[str, Any], limit_s: float) -> dict[str, Any] | None:
        """The answer to a task, None where there is none any more."""
        if self.failure is not None:
            return None
        deadline_s = time.monotonic() + limit_s
        try:
            self._write(task, deadline_s)
            answer = self._read(deadline_s)
        except _GivenUpError as error:
            self._give_up(str(error))
            return None
        if "error" in answer:
            self._give_up(str(answer["error"]))
            return None
        return answer

    def _give_up(self, why: str) -> None:
        if self.failure is None:
            self.failure = why
        self._process.kill()
        self._process.wait()

    def _write(self, task: Mapping[str, Any], deadline_s: float) -> None:
        left = memoryview(json.dumps(task).encode() + b"\n")
        while left:
            self._await(self._in, select.POLLOUT, deadline_s)
            try:
                left = left[os.write(self._in, left[:_PIPE_BYTES]) :]
            except BlockingIOError:  # a part of what it can take was too much
                continue
            except BrokenPipeError:
                raise _GivenUpError(self._ended()) from None

    def _read(self, deadline_s: float) -> dict[str, Any]:
        """The next line of its answers."""
        while b"\n" not in self._incoming:
            self._await(self._out, select.POLLIN, deadline_s)
            read = os.read(self._out, _PIPE_BYTES)
            if not read:
                raise _GivenUpError(self._ended())
            self._incoming += read
        line, _, rest = bytes(self._incoming).partition(b"\n")
        self._incoming = bytearray(rest)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise _GivenUpError(f"it answered {line[:80]!r}")
        return answer

    def _await(self, pipe: int, event: int, deadline_s: float) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise _GivenUpError(f"it took more than {self._limits.batch_s:g} s for a batch")

    def _ended(self) -> str:
        code = self._process.wait()
        return f"its process ended (exit code {code})"
