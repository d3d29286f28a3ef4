"""Writing a journal: beside the job, in a thread of its own, so that the job never waits for it."""

from __future__ import annotations

import errno
import os
import stat
import threading
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path

from llmpq.jobs.journal.entries import Entry, line_of
from llmpq.jobs.journal.thinning import thin_out

WRITE_S = 1.0
"""Seconds between looks for entries to write: what a kill costs of the journal."""

BEAT_S = 5.0
"""Seconds between signs of life, which are times of the file: who looks from another machine, where
the lock does not show, knows by them that the job runs."""

CLOSE_S = 5.0
"""Seconds that the end of a job waits for a disk that hangs."""

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class JournalWriter:
    """Appends entries to the journal at `path`; its methods return at once and raise nothing.

    Where the disk refuses, entries are lost, with one warning: a job never fails for its journal.
    A line that was cut off stays as it is; the next one begins anew.
    """

    def __init__(self, path: Path, write: Callable[[int, bytes], int] = os.write) -> None:
        self._path = path
        self._write = write
        self._entries: deque[Entry] = deque()
        self._descriptor: int | None = None
        self._is_torn = self._has_warned = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmpq-journal", daemon=True)
        self._thread.start()

    def note(self, entry: Entry) -> None:
        """Have an entry written soon; can be called from any thread."""
        self._entries.append(entry)

    def close(self) -> None:
        """Write what is left, and end."""
        self._closed.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        waited_s = BEAT_S
        is_last = False
        while not is_last:
            is_last = self._closed.wait(WRITE_S if self._descriptor is not None else 0)
            waited_s += WRITE_S
            try:
                self._append()
                if waited_s >= BEAT_S:
                    self._beat()
                    waited_s = 0.0
            except OSError as error:
                self._fail(error)
                is_last = is_last or self._closed.wait(BEAT_S)
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _append(self) -> None:
        if self._descriptor is None:
            self._descriptor, self._is_torn = _opened(self._path)
        lines = [line_of(self._entries.popleft()) for _ in range(len(self._entries))]
        if not lines:
            return
        data = b"\n" * self._is_torn + b"".join(lines)
        self._is_torn = True
        while data:
            data = data[self._write(self._descriptor, data) :]
        self._is_torn = False

    def _beat(self) -> None:
        if self._descriptor is not None:
            os.utime(self._descriptor)

    def _fail(self, error: OSError) -> None:
        self._entries.clear()
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._path}, the journal of the job, cannot be written: {error.strerror}; the "
                "job goes on without it",
                stacklevel=1,
            )


def _opened(path: Path) -> tuple[int, bool]:
    """Descriptor of the journal, and whether its last line was cut off; raises OSError."""
    thin_out(path)
    descriptor = os.open(path, _FLAGS, 0o666)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file")
    size = found.st_size
    return descriptor, size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
