"""Contestants that take turns: long-lived processes, of which all but one stand still.

A contestant's program makes itself ready and calls `serve`; the race starts it as a `Contestant`
and sends it one pass of prompts at a time. Between its passes all of its processes are stopped
(SIGSTOP), so that no spinning thread, poll or timer takes anything from the one that is timed.
Needs only Python's own library, for programs that run in other environments. Linux.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

from benchmarks.machine import process_tree, stands_still

Prompts = list[list[int]]

READY = "contestant is ready"
MARK = "contestant answers "
SETTLE_S = 0.5
"""Given to timers that are due when a contestant goes on, before its pass begins."""
END_S = 60.0
DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


class ContestantError(Exception):
    """A contestant ended, or did not do what was asked of it."""


@dataclass(frozen=True)
class Pass:
    """Tokens generated and seconds taken by one pass over prompts."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second."""
        return self.tokens / self.seconds


def serve(run: Callable[[Prompts], int], what: str = "") -> None:
    """Answer each line of prompts from stdin with the tokens that `run` made of it and its seconds.

    `what` says how the work is done. Called by the contestant's program when it is ready.
    """
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    print(f"\n{READY} {what}", flush=True)
    for line in sys.stdin:
        prompts = json.loads(line)
        began = time.perf_counter()
        tokens = run(prompts)
        seconds = time.perf_counter() - began
        print(f"\n{MARK}{json.dumps([tokens, seconds])}", flush=True)


def spread(values: Sequence[float], digits: int) -> str:
    """The median, with least and most."""
    least, most = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return f"{median(values):.{digits}f} ({least} to {most})"


class Contestant:
    """Context manager over a contestant's processes, which move only during its passes."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.what = ""
        self._command, self._environment, self._log = command, environment, log
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Start it, wait until it is ready, and stop it."""
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | self._environment,
                start_new_session=True,
            )
        try:
            self.what = self._line_after(READY).strip()
        except BaseException:
            self._end()
            raise
        self._stop()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let it end by itself; after an error, or where it takes too long, kill it."""
        assert self._process is not None
        self._signal(signal.SIGCONT)
        if error is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        self._end()

    @property
    def pid(self) -> int:
        """The id of its first process."""
        assert self._process is not None
        return self._process.pid

    def run(self, prompts: Prompts, new_tokens: int) -> Pass:
        """One pass, between going on and being stopped; each prompt must get `new_tokens`."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        time.sleep(SETTLE_S)
        try:
            self._process.stdin.write(json.dumps(prompts) + "\n")
            self._process.stdin.flush()
            found = Pass(*json.loads(self._line_after(MARK)))
        except BrokenPipeError:
            raise ContestantError(self._ended()) from None
        finally:
            self._stop()
        if found.tokens != len(prompts) * new_tokens:
            raise ContestantError(
                f"{self.name} made {found.tokens} tokens of {len(prompts)} prompts, not "
                f"{len(prompts) * new_tokens}"
            )
        return found

    def _line_after(self, mark: str) -> str:
        """The rest of the next line that begins with `mark`, among what libraries print."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        raise ContestantError(self._ended())

    def _ended(self) -> str:
        return f"{self.name} ended; the last it said:\n{self._log.read_text()[-3000:]}"

    def _stop(self) -> None:
        """Stop the whole tree; each thread runs on until the kernel has told it."""
        self._signal(signal.SIGSTOP)
        while not all(stands_still(pid) for pid in process_tree(self.pid)):
            time.sleep(0.001)

    def _signal(self, number: signal.Signals) -> None:
        """Send it to the whole tree, parents first: one that stands still starts nothing more."""
        sent: set[int] = set()
        while new := [pid for pid in process_tree(self.pid) if pid not in sent]:
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            sent.update(new)

    def _end(self) -> None:
        assert self._process is not None
        self._signal(signal.SIGKILL)
        self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it has started and left behind
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
