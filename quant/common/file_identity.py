"""What the file system says of a file, by which a later change shows without reading it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from time import sleep, time

_CLOCK_TICK_S = 0.02
"""Changes of a file within one tick of the kernel's clock get the same time: 10 ms at most."""

_COARSE_TICK_S = 2.0
"""The same where a file system stores whole seconds, or two."""


@dataclass(frozen=True)
class FileIdentity:
    """A file as long as nobody changes it; `changed_ns` is a time that no program can set."""

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
        """Whether the last change is a clock tick ago, so that a later one shows."""
        return self._unsettled_s() <= 0

    def settle(self) -> None:
        """Wait until the last change is a clock tick ago: milliseconds, right after it.

        Of a time that lies ahead of this machine's clock, no longer than a tick.
        """
        sleep(min(self._tick_s, max(0.0, self._unsettled_s())))

    @property
    def _tick_s(self) -> float:
        return _CLOCK_TICK_S if self.changed_ns % 1_000_000_000 else _COARSE_TICK_S

    def _unsettled_s(self) -> float:
        return self.changed_ns / 1e9 + self._tick_s - time()
