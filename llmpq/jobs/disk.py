"""What a job does to the disk: one call each, which tests can fail, whole files, and the lock."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from quant.common.errors import InputError

_DIGEST_BYTES = 16


def new_digest() -> Any:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, new_digest).hexdigest()


class Disk:
    """Calls of the operating system."""

    def open_new(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: Any) -> int:
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)


class Sink(io.RawIOBase):
    """An open file that libraries write to; `error` is an OSError they may have swallowed."""

    def __init__(self, disk: Disk, descriptor: int) -> None:
        self._disk = disk
        self._descriptor = descriptor
        self._seen = new_digest()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        self._seen.update(left)
        size = len(left)
        try:
            while left:
                left = left[self._disk.write(self._descriptor, left) :]
        except OSError as error:
            self.error = error
            raise
        return size

    def digest(self) -> str:
        """Digest of the bytes written, as `file_digest` gives it."""
        return str(self._seen.hexdigest())


def commit_file(disk: Disk, path: Path, aside: Path, fill: Callable[[Sink], object]) -> str:
    """Write a file that is there whole or not at all, also after a power cut; returns its digest.

    `fill` writes it under the name `aside` in the same file system; it is brought to the disk and
    then gets its name. Where there is no room for it, it is removed. Other than in
    `quant.common.files`, each call can be made to fail in tests, content need not fit the
    memory, and the name aside is known, so that the next run finds what a kill has left.
    """
    descriptor = disk.open_new(aside)
    try:
        try:
            sink = Sink(disk, descriptor)
            fill(sink)
            if sink.error is not None:
                raise sink.error
            disk.fsync(descriptor)
        finally:
            disk.close(descriptor)
        disk.rename(aside, path)
        disk.sync_folder(path.parent)
        return sink.digest()
    except OSError:
        with suppress(OSError):
            disk.unlink(aside)
        raise


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
