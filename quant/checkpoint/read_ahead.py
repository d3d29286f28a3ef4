"""Reading byte ranges of files into the page cache in the order of their use, while something else
is computed. Files are mapped, so that a page that is not in memory stops the thread that touches
it; what this thread reads takes one small buffer of the process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

READ_AHEAD_BYTES = 256 << 20
"""Bytes read ahead of the tensor in use: more than any linear of a 30B model."""

_CHUNK_BYTES = 4 << 20
"""Bytes read at once: enough for a disk's full speed, and soon done when the reader has to stop."""

ReadInto = Callable[[int, Sequence[memoryview], int], int]
"""A function such as `os.preadv(descriptor, buffers, offset)`."""

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
"""Flag of Linux: an error instead of waiting for a disk."""


def is_cached(descriptor: int, start: int, stop: int) -> bool:
    """Whether first, middle and last byte of a range are in memory; False where it cannot tell."""
    byte = bytearray(1)
    try:
        places = (start, (start + stop) // 2, stop - 1)
        return bool(_NOWAIT) and all(os.preadv(descriptor, [byte], p, _NOWAIT) for p in places)
    except OSError:
        return False


@dataclass(frozen=True)
class FileRange:
    path: Path
    start: int
    stop: int


class ReadAhead:
    """Reads `ranges` in a thread, at most `window_bytes` beyond the last range that was waited for;
    `wait_for` has to be called before a range is used.
    """

    def __init__(
        self,
        ranges: Sequence[FileRange],
        window_bytes: int = READ_AHEAD_BYTES,
        read_into: ReadInto = os.preadv,
        is_there: Callable[[int, int, int], bool] = is_cached,
    ) -> None:
        self._ranges = tuple(dict.fromkeys(ranges))
        self._window_bytes = window_bytes
        self._read_into = read_into
        self._is_there = is_there
        self._end_of: dict[FileRange, int] = {}
        end = 0
        for file_range in self._ranges:
            end += file_range.stop - file_range.start
            self._end_of[file_range] = end
        self._changed = threading.Condition()
        self._allowed = window_bytes
        self._finished: set[FileRange] = set()
        self._errors: dict[FileRange, OSError] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._read_all, name="read-ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def wait_for(self, wanted: FileRange) -> None:
        """Wait until `wanted` is read; return at once if it is none of the ranges. OSError if
        unreadable.
        """
        if wanted not in self._end_of:
            return
        with self._changed:
            self._allowed = max(self._allowed, self._end_of[wanted] + self._window_bytes)
            self._changed.notify_all()
            self._changed.wait_for(lambda: wanted in self._finished or self._stopping)
            if wanted in self._errors:
                raise self._errors[wanted]

    def _read_all(self) -> None:
        try:
            position = 0
            buffer = memoryview(bytearray(_CHUNK_BYTES))
            for file_range in self._ranges:
                try:
                    if not self._read(file_range, position, buffer):
                        return
                except OSError as error:  # raised where this range is waited for
                    self._errors[file_range] = error
                position = self._end_of[file_range]
                with self._changed:
                    self._finished.add(file_range)
                    self._changed.notify_all()
        finally:
            with self._changed:  # so that nobody waits for a thread that has ended
                self._stopping = True
                self._changed.notify_all()

    def _read(self, file_range: FileRange, position: int, buffer: memoryview) -> bool:
        descriptor = os.open(file_range.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if self._is_there(descriptor, file_range.start, file_range.stop):
                return True  # reading it would only use memory bandwidth
            offset = file_range.start
            while offset < file_range.stop:
                ahead = position + offset - file_range.start
                if not self._may_read(ahead):
                    return False
                wanted = buffer[: min(len(buffer), file_range.stop - offset)]
                count = self._read_into(descriptor, [wanted], offset)
                if not count:
                    raise OSError(f"{file_range.path} ends at byte {offset}, not {file_range.stop}")
                offset += count
        finally:
            os.close(descriptor)
        return True

    def _may_read(self, position: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: position < self._allowed or self._stopping)
            return not self._stopping
