"""The driver's side of the process that tokenizes: tasks in, answers out, one process at a time.

No content of a row meets native code here. A task that takes too long or ends the process is
answered with its cause, and the others go on in a new process.
"""

from __future__ import annotations

import json
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llmpq.tokenizing import tokenizer_child
from llmpq.tokenizing.child_process import ChildEndedError, JsonChild
from llmpq.tokenizing.prompting import Prompting
from llmpq.tokenizing.reasoning import Markers
from llmpq.tokenizing.tool_calls import CallReading, call_reading
from quant.common.errors import CheckpointError, SpecError
from quant.common.text import printable

ROW_S = 30.0
"""Seconds for a row: a prompt of a million tokens takes about one."""

ROW_BYTES = 2 << 30
"""Memory for a row: a prompt of a million tokens takes 0.5 GiB, the process itself 0.1 GiB."""

MOST_ROW_S = 86_400.0
"""One day. More would mean no limit, and poll takes at most 2^31 milliseconds."""

_LOAD_S = 120.0
_LOAD_BYTES = 8 << 30  # a tokenizer.json of 30 MB takes about 1 GiB
_GRACE_S = 10.0  # the process ends itself in time; this is for one that cannot
_REMEMBERED_FORMS = 64
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
_REMEDY = "take the model's own files again (those beside its weights on the hub)"


@dataclass(frozen=True)
class RowLimits:
    """Limits of a row: seconds, bytes beyond the process's own, and tokens (None: any)."""

    row_s: float = ROW_S
    row_bytes: int = ROW_BYTES
    most_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.row_s <= MOST_ROW_S:
            raise SpecError(
                f"row_s is {self.row_s:g}; give seconds above 0 and at most {MOST_ROW_S:g}"
            )


@dataclass(frozen=True)
class Tokenized:
    """Outcome of a task: `ids`, `text` or `texts`, or the `error` and what it is `of`.

    `tokens` or `characters` give a number that is too large, in place of ids.
    """

    ids: tuple[int, ...] | None = None
    text: str | None = None
    texts: tuple[str, ...] | None = None
    tokens: int | None = None
    characters: int | None = None
    error: str | None = None
    of: str = "tokenizer"


class _Task(NamedTuple):
    number: int
    of: str
    line: bytes


class TokenizerProcess:
    """Runs the tokenizer of the model in `folder`; answers come in the order of the tasks.

    It is ready when `wait` returns. `behind_bytes`: size of the tasks without an answer.
    `on_failure` is called with what a task did to the process, and with the seconds that it cost.
    `program`: the Python file that the process runs. `prompting`: options of rows that do not say.
    """

    def __init__(
        self,
        folder: Path,
        limits: RowLimits,
        program: Path = Path(tokenizer_child.__file__),
        prompting: Prompting | None = None,
    ) -> None:
        self.limits = limits
        self._options = (prompting or Prompting()).settings
        self._markers: Markers | None = None
        self._tool_parser: str | None = None
        self._has_said_begin = False
        self.on_failure: Callable[[str, float], None] = lambda cause, lost_s: None
        self.most_characters: int | None = None
        self._folder = folder
        self._program = program
        self.behind_bytes = 0
        self._numbers = 0
        self._waiting: deque[_Task] = deque()
        self._answers: dict[int, Tokenized] = {}
        self._forms: dict[tuple[str, bool | None], Tokenized] = {}
        self._retried = -1
        self._forgotten = 0
        self._heard_s = time.monotonic()
        self._is_ready = False
        self._start()

    def wait(self) -> None:
        """Wait until it is loaded; raises `CheckpointError` where it cannot be, naming the file."""
        while not self._is_ready:
            self._exchange()

    @property
    def markers(self) -> Markers | None:
        """What the model's reasoning stands between, if it has such tokens; waits as `wait`."""
        self.wait()
        return self._markers

    @property
    def tool_parser(self) -> str | None:
        """How the model writes calls of tools, if that is known; waits as `wait`."""
        self.wait()
        return self._tool_parser

    def call_reading(self, options: Mapping[str, Any]) -> CallReading | None:
        """How calls are read in the answer to a chat with these `Row.prompt_options`."""
        return call_reading(options, self.tool_parser, self._options)

    @property
    def pid(self) -> int:
        return self._child.pid

    def submit(self, task: Mapping[str, Any]) -> int:
        """Add a task (`tokenizer_child.py`), return its number. ValueError, TypeError: no JSON."""
        self._numbers += 1
        line = json.dumps(task).encode() + b"\n"
        of = "chat template or tokenizer" if "chat" in task else "tokenizer"
        self._waiting.append(_Task(self._numbers, of, line))
        self.behind_bytes += len(line)
        self._child.send(line)
        return self._numbers

    def answer(self, number: int) -> Tokenized:
        """That task's answer, once. CheckpointError where no new process can be started."""
        self.wait()
        self._heard_s = time.monotonic()
        while number not in self._answers:
            self._exchange()
        return self._answers.pop(number)

    def ask(self, task: Mapping[str, Any]) -> Tokenized:
        return self.answer(self.submit(task))

    def kept_form(self, form: str, has_begun: bool | None = None) -> Tokenized:
        """`form`, `Sampling.structured_outputs`, as stages keep it, or the `error` why answers
        cannot have it. An answer may reason before, unless `has_begun` is None: whether the prompt
        begins that. One that was asked about before takes no time.
        """
        key = form, has_begun
        if key not in self._forms:
            if len(self._forms) >= _REMEMBERED_FORMS:
                del self._forms[next(iter(self._forms))]
            self._forms[key] = self.ask({"form": form, "has_begun": has_begun})
        return self._forms[key]

    def forget(self) -> None:
        """Forget all tasks so far, whose answers nobody asks for any more."""
        self._answers.clear()
        self._forgotten = self._numbers

    @property
    def is_alive(self) -> bool:
        """Whether tasks can be given to it: it is not closed, and has not failed for good."""
        return self._child.end.alive

    def close(self) -> None:
        """End the process; no task can be given to it, and no answer asked for, from then on."""
        self._child.end()

    def _start(self) -> None:
        settings = {
            "folder": str(self._folder),
            "load_s": _LOAD_S,
            "load_bytes": _LOAD_BYTES,
            "options": self._options,
            **vars(self.limits),
        }
        self._child = JsonChild(self._program, settings, "tokenizes")
        for task in self._waiting:
            self._child.send(task.line)
        self._is_ready = False

    def _exchange(self) -> None:
        """Write tasks and read answers, waiting for either for a limited time."""
        try:
            limit_s = self.limits.row_s if self._is_ready else _LOAD_S
            lines = self._child.exchange(limit_s + _GRACE_S)
        except TimeoutError:
            self._ended(-signal.SIGALRM)
            return
        except ChildEndedError as error:
            self._ended(error.code)
            return
        if lines:
            self._heard_s = time.monotonic()
        for line in lines:
            content = json.loads(line)
            if self._is_ready:
                self._say_begin(content.pop("begins_with", None))
                self._note_answer(_tokenized(content))
            else:
                self._take_first(content)

    def _note_answer(self, answer: Tokenized) -> None:
        task = self._waiting.popleft()
        self.behind_bytes -= len(task.line)
        if task.number > self._forgotten:
            self._answers[task.number] = answer

    def _say_begin(self, begin: str | None) -> None:
        """Say once that prompts have the token already that the tokenizer begins texts with."""
        if begin is None or self._has_said_begin:
            return
        self._has_said_begin = True
        warnings.warn(
            f"prompts begin with {printable(begin)} already, as rendered ones do: the tokenizer "
            "adds no second one",
            stacklevel=4,
        )

    def _take_first(self, content: Mapping[str, Any]) -> None:
        if "error" in content:
            self.close()
            raise self._unusable(content["file"], content["error"])
        self._is_ready = True
        self.most_characters = content["most_characters"]
        markers = content.get("markers")
        self._markers = None if markers is None else Markers(*markers)
        self._tool_parser = content.get("tool_parser")
        for text in content["warnings"]:
            warnings.warn(f"the tokenizer in {self._folder}: {printable(text)}", stacklevel=4)

    def _ended(self, code: int) -> None:
        """Give the task in hand its cause, as the process is gone, and the others a new process."""
        self.close()
        if not self._is_ready:
            late = f"took more than {_LOAD_S:g} s, as on a slow disk: copy the folder to a fast one"
            raise self._unusable(str(self._folder), f"loading it {_why(code, late)}")
        cause = _why(code, f"took more than {self.limits.row_s:g} s (--row_s)")
        if self._waiting:
            task = self._waiting[0]
            if -code in _FROM_OUTSIDE and task.number != self._retried:
                self._retried = task.number  # perhaps another process was to blame
            else:
                self._note_answer(Tokenized(error=cause, of=task.of))
                self.on_failure(cause, time.monotonic() - self._heard_s)
        self._start()

    def _unusable(self, file: str, why: str) -> CheckpointError:
        return CheckpointError(
            f"the tokenizer in {self._folder} cannot be loaded: {file}: {why}; {_REMEDY}"
        )


def _tokenized(content: Mapping[str, Any]) -> Tokenized:
    if "ids" in content:
        return Tokenized(ids=tuple(content["ids"]))
    if "texts" in content:
        return Tokenized(texts=tuple(content["texts"]))
    if "error" in content:  # a template may raise any text
        return Tokenized(error=printable(content["error"]), of=content["of"])
    return Tokenized(**content)


def _why(code: int, late: str) -> str:
    """Words for exit code `code`; `late` where the alarm ended the process."""
    if code == -signal.SIGALRM:
        return late
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended the process ({name}), as too much memory or recursion does"
    return f"ended the process (exit code {code})"
