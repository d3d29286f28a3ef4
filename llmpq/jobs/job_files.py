"""Files of a job: shards, whose names say what they hold, and files known again by their state."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from llmpq.jobs.disk import Disk, commit_file, file_digest, new_digest
from quant.common.files import FileIdentity

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
        return _identities(shards) == self.identities or all(each.is_whole() for each in shards)


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
