"""A lock that lets one driver at a time write an output."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from quant.common.errors import InputError


class OutputLock:
    """An exclusive lock on a file, given back by the kernel however the process ends.

    Raises `InputError` while another process holds it.
    """

    def __init__(self, path: Path, output: Path) -> None:
        self._path = path
        while True:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._descriptor)
                raise InputError(
                    f"output {output} is being written by another llmpq run; wait for its end or "
                    "name another output"
                ) from error
            if self._is_the_file():
                return
            os.close(self._descriptor)  # its holder removed it between our two calls

    def release(self) -> None:
        """Remove the file, then unlock it: a process that opened it before sees that it is gone."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _is_the_file(self) -> bool:
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        ours = os.fstat(self._descriptor)
        return (there.st_ino, there.st_dev) == (ours.st_ino, ours.st_dev)
