"""A Python file in a child process of the driver's, which is asked by lines of JSON."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quant.common.errors import DeviceError
from quant.common.text import SECRET_VARIABLES

_PIPE_BYTES = 1 << 16


class ChildEndedError(Exception):
    """The process has ended, with exit code `code` (a signal's number below zero)."""

    def __init__(self, code: int) -> None:
        super().__init__(f"its process ended (exit code {code})")
        self.code = code


class JsonChild:
    """Runs `program` with `settings` as JSON in its only argument, until `end` or until nobody
    holds this object; `does` tells in a message what it is for.

    The process has no secrets, no network and no threads of its own. Raises `DeviceError` where it
    cannot be started.
    """

    def __init__(self, program: Path, settings: Mapping[str, Any], does: str) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(program), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # Rust reports every panic there
                bufsize=0,
                env=_environment(),
            )
        except OSError as error:
            raise DeviceError(
                f"the process that {does} cannot be started: {error.strerror}; free memory or "
                "processes"
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._outgoing, self._incoming = bytearray(), bytearray()
        self.pid = self._process.pid
        self.kill = self._process.kill
        """Kill the process; another thread that waits in `exchange` finds its end."""
        self.end = weakref.finalize(self, _end, self._process)
        """Kill the process and close its pipes; nothing else may be called from then on."""

    def send(self, line: bytes) -> None:
        """Send a line of JSON, later if there are few: `exchange` and `write` do it at once."""
        self._outgoing += line
        if len(self._outgoing) >= _PIPE_BYTES:
            self.write()

    def write(self) -> None:
        """Write as much of what was sent as the pipe takes."""
        assert self.end.alive, "its pipes are closed, and their numbers may be others' by now"
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._in, self._outgoing[:_PIPE_BYTES])]
        except BlockingIOError:
            return
        except BrokenPipeError:  # `exchange` tells of it
            self._outgoing.clear()

    def exchange(self, limit_s: float) -> list[bytes]:
        """Write or read; return lines that are complete. TimeoutError, or `ChildEndedError`."""
        assert self.end.alive, "as in `write`"
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        if self._outgoing:
            poll.register(self._in, select.POLLOUT)
        events = dict(poll.poll(limit_s * 1000)) if limit_s > 0 else {}
        if not events:
            raise TimeoutError
        if self._in in events:
            self.write()
        if self._out not in events:
            return []
        read = os.read(self._out, _PIPE_BYTES)
        if not read:
            raise ChildEndedError(self._process.wait())
        self._incoming += read
        if b"\n" not in read:
            return []
        *lines, self._incoming = self._incoming.split(b"\n")
        return list(map(bytes, lines))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    return kept | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
