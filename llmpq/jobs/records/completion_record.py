"""State of the files of a job that is done, by which the next start need not read a row."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from llmpq.jobs.records.disk import file_digest, new_digest
from llmpq.jobs.records.shards import Shard
from llmpq.version import llmpq_version
from quant.common.files import FileIdentity


@dataclass(frozen=True)
class FileRecord:
    """State of a file; `identity` is None where a later change would not show in it."""

    name: str
    file_bytes: int
    digest: str
    identity: FileIdentity | None

    @classmethod
    def of(cls, path: Path, name: str) -> FileRecord | None:
        """State of the file at `path`; None where it changes meanwhile."""
        (identity,) = settled_identities([path])
        digest = file_digest(path)
        if FileIdentity.of(path) != identity:
            return None
        known = identity if identity.is_settled else None
        return cls(name, identity.file_bytes, digest, known)

    def matches(self, path: Path) -> bool:
        """Whether `path` holds the same bytes; they are read where the file system cannot tell."""
        now = FileIdentity.of(path)
        if now == self.identity:
            return True
        return now.file_bytes == self.file_bytes and file_digest(path) == self.digest


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
        if _identities(shards) == self.identities:
            return True
        return all(shard.is_whole() for shard in shards)


@dataclass(frozen=True)
class InputRecord:
    """The input of a job that is done: its rows, and how many of them ended in an error."""

    rows: int
    errors: int
    files: tuple[FileRecord, ...]


ReadInputAgain = Callable[[], InputRecord | None]
"""Reads the files of the input once more; None where they cannot be recorded."""


@dataclass(frozen=True)
class JobRecord:
    """Input and output when the last row was done, and the version of llmpq."""

    input: InputRecord
    output: FileRecord | FolderRecord
    llmpq: str

    @classmethod
    def of(cls, given: InputRecord, output: FileRecord | FolderRecord) -> JobRecord:
        """Record of a job that this version of llmpq has done."""
        return cls(given, output, llmpq_version())

    @classmethod
    def read(cls, content: object) -> JobRecord | None:
        """The record in a manifest; None for none, for a broken one and for another llmpq's.

        Another llmpq may have understood rows otherwise, so that they must be looked at.
        """
        try:
            found = _ADAPTER.validate_python(content)
        except ValidationError:
            return None
        return found if found.llmpq == llmpq_version() else None


_ADAPTER: TypeAdapter[JobRecord] = TypeAdapter(JobRecord)


def settled_identities(paths: Sequence[Path]) -> list[FileIdentity]:
    """Identities of `paths` once their last change is a clock tick ago.

    Waits for that, in vain where the clock is wrong. Raises OSError where one cannot be looked at.
    """
    identities = [FileIdentity.of(path) for path in paths]
    if identities:
        max(identities, key=lambda identity: identity.changed_ns).settle()
    return [FileIdentity.of(path) for path in paths]


def _names(shards: Sequence[Shard]) -> str:
    return _digest_of([shard.path.name for shard in shards])


def _identities(shards: Sequence[Shard]) -> str:
    return _digest_of([astuple(FileIdentity.of(shard.path)) for shard in shards])


def _digest_of(content: Sequence[object]) -> str:
    seen = new_digest()
    seen.update(json.dumps(content).encode())
    return str(seen.hexdigest())
