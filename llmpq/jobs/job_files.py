"""Files of a job: calls of the disk, which tests can fail, whole files and the lock; its shards."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from quant.common.errors import InputError
from quant.common.files import FileIdentity
from quant.common.url_files import AnyFile, UrlFile, identity_of
from quant.common.url_mirror import UrlMirror

_DIGEST_BYTES = 16


def new_digest() -> Any:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def file_digest(path: AnyFile) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, new_digest).hexdigest()


class Disk:
    write = staticmethod(os.write)
    fsync = staticmethod(os.fsync)
    close = staticmethod(os.close)
    rename = staticmethod(os.replace)

    def open_new(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

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


class MirroredDisk(Disk):
    """A disk of which a folder has a copy behind a URL, file by file as each gets its name."""

    def __init__(self, mirror: UrlMirror) -> None:
        self._mirror = mirror

    def rename(self, aside: Path, path: Path) -> None:  # type: ignore[override]
        os.replace(aside, path)
        if self._mirror.is_kept(path.name):
            self._mirror.put(path)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if self._mirror.is_kept(path.name):
            self._mirror.remove(path.name)


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
    """An exclusive lock on a file, which the kernel frees; InputError while another holds it."""

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


_NAME = re.compile(r"part-(\d+)-(\d+)-(\d+)-([0-9a-f]{16})\.jsonl")
_READ_BYTES = 2**20
SHARD_ASIDE = "shard.part"
DAMAGED_SUFFIX = ".damaged"


@dataclass(frozen=True, order=True)
class Shard:
    """A file of results of a job; sorted in the order in which they were written.

    Its name is `part-GENERATION-NUMBER-ROWS-DIGEST.jsonl`. Renaming it into place commits its rows,
    and with them their number and digest: no second file has to agree.
    """

    generation: int
    number: int
    rows: int
    digest: str
    path: Path

    @property
    def source(self) -> int:
        """Number of the shard among the files of a job, of which the finished one is number 0."""
        return self.number + 1

    def is_whole(self) -> bool:
        """Whether the content is what the name says; raises OSError where it cannot be read."""
        seen, lines = hashlib.blake2b(digest_size=8), 0
        with self.path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                seen.update(block)
                lines += block.count(b"\n")
        return (lines, seen.hexdigest()) == (self.rows, self.digest)

    def lines(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            yield from file


def is_shard(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def shards_in(folder: Path) -> list[Shard]:
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            generation, number, rows, digest = match.groups()
            found.append(Shard(int(generation), int(number), int(rows), digest, path))
    return sorted(found)


def write_shard(
    disk: Disk, folder: Path, generation: int, number: int, lines: Sequence[bytes]
) -> None:
    """Commit `lines`; a commit that was cut off can be done again."""
    data = b"".join(lines)
    digest = hashlib.blake2b(data, digest_size=8).hexdigest()
    path = folder / f"part-{generation:03d}-{number:06d}-{len(lines)}-{digest}.jsonl"
    commit_file(disk, path, folder / SHARD_ASIDE, lambda sink: sink.write(data))


@dataclass(frozen=True)
class FileRecord:
    """State of a file; `identity` is None where a later change would not show in it, and `digest`
    is empty where a store tells versions, which spares reading it.
    """

    name: str
    file_bytes: int
    digest: str
    identity: FileIdentity | None

    @classmethod
    def of(cls, path: AnyFile, name: str) -> FileRecord | None:
        """State of the file at `path`; None where it changes meanwhile."""
        (identity,) = settled_identities([path])
        tells = isinstance(path, UrlFile) and identity.is_settled
        digest = "" if tells else file_digest(path)
        if identity_of(path) != identity:
            return None
        known = identity if identity.is_settled else None
        return cls(name, identity.file_bytes, digest, known)

    def matches(self, path: AnyFile) -> bool:
        """Whether `path` holds the same bytes; they are read where the file system cannot tell."""
        now = identity_of(path)
        if now == self.identity:
            return True
        if now.file_bytes != self.file_bytes:
            return False
        return bool(self.digest) and file_digest(path) == self.digest


@dataclass(frozen=True)
class FolderRecord:
    """State of a folder of shards.

    `names`: a digest of their names, which hold digests of their content. `identities`: one of what
    the file system says of them, None where a later change would not show in it.
    """

    names: str
    identities: str | None

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> FolderRecord | None:
        """State of `shards`; None where one is damaged or changes meanwhile."""
        settled = settled_identities([shard.path for shard in shards])
        before = _identities(shards)
        if not all(shard.is_whole() for shard in shards) or _identities(shards) != before:
            return None
        known = all(identity.is_settled for identity in settled)
        return cls(_names(shards), before if known else None)

    def matches(self, shards: Sequence[Shard]) -> bool:
        """Whether `shards` are the same; they are read where the file system cannot tell."""
        if _names(shards) != self.names:
            return False
        return _identities(shards) == self.identities or all(each.is_whole() for each in shards)


def settled_identities(paths: Sequence[AnyFile]) -> list[FileIdentity]:
    """Identities of `paths`, after a clock tick without a change. Raises OSError."""
    identities = [identity_of(path) for path in paths]
    if identities:
        max(identities, key=lambda identity: identity.changed_ns).settle()
    return [identity_of(path) for path in paths]


def _names(shards: Sequence[Shard]) -> str:
    return _digest_of([shard.path.name for shard in shards])


def _identities(shards: Sequence[Shard]) -> str:
    return _digest_of([astuple(FileIdentity.of(shard.path)) for shard in shards])


def _digest_of(content: Sequence[object]) -> str:
    seen = new_digest()
    seen.update(json.dumps(content).encode())
    return str(seen.hexdigest())
