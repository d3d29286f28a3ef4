"""Words that a library writes to the terminal by itself: Ray's Python, C++ and processes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, BinaryIO

LOGGER = "llmpq"
"""At level DEBUG of this logger (`--verbose`) nothing is caught."""

MOST_CHARACTERS = 20_000
"""Characters kept of the end: Ray repeats some of its lines every second."""


_TELL = """read -r done && exit
{ echo "llmpq: the process has ended while Ray was started; the same command may work"
  echo "when the machine is less busy. Ray's last words:"; tail -n 3 "/proc/self/fd/$0"; } >&2"""
"""Tells the last words in the file of descriptor `$0`, unless a line comes before the end."""

_alone = threading.Lock()  # two that end in another order would leave the streams astray


def is_verbose() -> bool:
    """Whether words of libraries are shown as they come."""
    return logging.getLogger(LOGGER).isEnabledFor(logging.DEBUG)


class Words:
    def __init__(self, file: BinaryIO | None) -> None:
        self._file = file
        self._text = ""

    @property
    def text(self) -> str:
        if self._file is not None and not self._file.closed:
            number = self._file.fileno()
            begin = max(0, os.fstat(number).st_size - 4 * MOST_CHARACTERS)
            said = os.pread(number, 4 * MOST_CHARACTERS, begin)  # writing goes on elsewhere
            self._text = said.decode(errors="replace")[-MOST_CHARACTERS:].strip()
        return self._text


@contextmanager
def caught_words(last_told: bool = False) -> Iterator[Words]:
    """Catch what this thread, C++ code and child processes write to the standard streams.

    Other threads write on, where Python has the streams as usual. Nothing is caught if words are to
    be shown, where the process has no such streams, or while another thread catches them.
    `last_told`: the last of them are told where they come to no end, as the process is ended.
    """
    with ExitStack() as stack:
        file = None
        if not is_verbose() and _alone.acquire(blocking=False):
            stack.callback(_alone.release)
            file = _unnamed_file()
        words = Words(file)
        if file is not None:
            stack.enter_context(file)
            stack.callback(lambda: words.text)  # read before the file is closed
            if last_told:
                stack.enter_context(_last_words_told(file))
            for name, descriptor in (("stdout", 1), ("stderr", 2)):
                stack.enter_context(_redirected(name, descriptor, file))
        yield words


@contextmanager
def _last_words_told(file: BinaryIO) -> Iterator[None]:
    """Have a child process tell the end of `file` where this one ends in the middle: C++ code of
    Ray leaves the process at once where it cannot register, which nothing here could notice.
    """
    number = file.fileno()
    command = ["sh", "-c", _TELL, str(number)]
    try:
        teller = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[number]
        )
    except OSError:  # no shell, or no room for a process
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):  # it was ended with Ray's processes
            teller.communicate(b"done\n")


def _unnamed_file() -> BinaryIO | None:
    """A file in memory where the system has that, as the disk may be full; None without any."""
    try:
        if hasattr(os, "memfd_create"):
            return os.fdopen(os.memfd_create("llmpq-words"), "w+b", buffering=0)
        return tempfile.TemporaryFile(buffering=0)
    except OSError:
        return None


@contextmanager
def _redirected(name: str, descriptor: int, file: BinaryIO) -> Iterator[None]:
    """Have `descriptor` lead to `file`, while other threads find the old one in `sys`."""
    stream = getattr(sys, name)
    try:
        kept = os.dup(descriptor)
    except OSError:  # closed, as in some services
        yield
        return
    is_usual = _descriptor_of(stream) == descriptor
    with open(kept, "w", buffering=1, encoding="utf-8", errors="backslashreplace") as real:
        shared = _StreamByThread(stream, real)
        if is_usual:
            stream.flush()
            setattr(sys, name, shared)
        os.dup2(file.fileno(), descriptor)
        try:
            yield
        finally:
            if is_usual:
                stream.flush()
                if getattr(sys, name) is shared:
                    setattr(sys, name, stream)
                shared.end()
            os.dup2(kept, descriptor)


def _descriptor_of(stream: Any) -> int | None:
    """The descriptor that a stream of `sys` writes to; None for one of a test or a notebook."""
    try:
        number: int = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None
    return number


class _StreamByThread:
    """Text stream that is `own` for the thread that made it, and `others` for all others."""

    def __init__(self, own: Any, others: Any) -> None:
        self._own, self._others = own, others
        self._thread = threading.get_ident()

    def _stream(self) -> Any:
        return self._own if threading.get_ident() == self._thread else self._others

    def write(self, text: str) -> int:
        count: int = self._stream().write(text)
        return count

    def flush(self) -> None:
        self._stream().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream(), name)

    def end(self) -> None:
        """Be `own` for whoever has kept it."""
        self._others = self._own
