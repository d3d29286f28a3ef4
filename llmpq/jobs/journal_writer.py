"""Writing a journal in a thread of its own, so that no job waits for it, and keeping it small."""

from __future__ import annotations

import errno
import os
import stat
import threading
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmpq.jobs.journal import (
    Entry,
    ProgressPoint,
    UnreadableEntryError,
    WorkDone,
    entry_of,
    line_of,
)
from quant.common.files import write_whole

WRITE_S = 1.0
"""Seconds between looks for entries to write: what a kill costs of the journal."""

BEAT_S = 5.0
"""Seconds between signs of life, which are times of the file: who looks from another machine, where
the lock does not show, knows by them that the job runs."""

CLOSE_S = 5.0
"""Seconds that the end of a job waits for a disk that hangs."""

THIN_BYTES = 2**19
"""Bytes of a journal from which on a new session leaves out half the points of those before."""

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


@dataclass
class Cadence:
    """Tells when the next point is due: every `share` of the age, within `least_s` and `most_s`."""

    least_s: float
    most_s: float
    share: float
    began_s: float
    due_s: float = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether a point is due; the next one is then due later."""
        if now_s < self.due_s:
            return False
        age_s = now_s - self.began_s
        self.due_s = now_s + min(self.most_s, max(self.least_s, self.share * age_s))
        return True


def point_cadence(began_s: float) -> Cadence:
    """One a second in the first minutes, one a minute from seven hours on: 0.6 MB in a week."""
    return Cadence(0.9, 60.0, 1 / 400, began_s)


def work_cadence(began_s: float) -> Cadence:
    return Cadence(5.0, 7200.0, 1 / 10, began_s)


def thin_out(path: Path) -> None:
    """Leave out every second point of a large journal, what was overtaken and what is no entry.

    Raises OSError as the disk does; the journal is replaced whole or not at all.
    """
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size < THIN_BYTES:
            return
    except FileNotFoundError:
        return
    kept: list[bytes] = []
    points = 0
    with path.open("rb") as file:
        for line in file:
            try:
                entry = entry_of(line)
            except UnreadableEntryError:
                continue
            points += isinstance(entry, ProgressPoint)
            if isinstance(entry, WorkDone) or (isinstance(entry, ProgressPoint) and points % 2):
                continue
            kept.append(line)
    write_whole(path, b"".join(kept).decode())
