"""Recognising a changed file by what the file system says of it, without reading it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from time import sleep, time

_CLOCK_TICK_S = 0.02
"""Changes of a file within one tick of the kernel's clock, at most 10 ms, get the same time."""

_COARSE_TICK_S = 2.0
"""The tick of file systems that store times in whole seconds, or every other second."""


@dataclass(frozen=True)
class FileIdentity:
    """A file in one state: equal as long as nobody changes it. No program can set `changed_ns`."""

    path: str
    inode: int
    file_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """The identity of the file at `path`; OSError where it cannot be looked at."""
        found = os.stat(path)
        times = (found.st_mtime_ns, found.st_ctime_ns)
        return cls(str(path.resolve()), found.st_ino, found.st_size, *times)

    @property
    def is_settled(self) -> bool:
        """Whether the last change is a clock tick ago, so that a later one gets another time."""
        return self._unsettled_s() <= 0

    def settle(self) -> None:
        """Wait until the last change is a clock tick ago, which takes milliseconds.

        If the file's time lies ahead of this machine's clock, wait for one tick.
        """
        sleep(min(self._tick_s, max(0.0, self._unsettled_s())))

    @property
    def _tick_s(self) -> float:
        return _CLOCK_TICK_S if self.changed_ns % 1_000_000_000 else _COARSE_TICK_S

    def _unsettled_s(self) -> float:
        return self.changed_ns / 1e9 + self._tick_s - time()
