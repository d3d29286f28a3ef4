"""Shards: finished results in files that are whole or not there, and that say what they hold.

A shard's name is `part-GENERATION-NUMBER-ROWS-DIGEST.jsonl`. Renaming it into place is what commits
its rows, and with them their number and digest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmpq.jobs.records.disk import Disk, commit_file

_NAME = re.compile(r"part-(\d+)-(\d+)-(\d+)-([0-9a-f]{16})\.jsonl")
_READ_BYTES = 2**20
SHARD_ASIDE = "shard.part"
DAMAGED_SUFFIX = ".damaged"


@dataclass(frozen=True, order=True)
class Shard:
    """A file of results of a job; sorted in the order in which they were written."""

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
        """The rows as lines of JSON."""
        with self.path.open("rb") as file:
            yield from file


def shards_in(folder: Path) -> list[Shard]:
    """All shards of a folder, of every generation."""
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            generation, number, rows, digest = match.groups()
            found.append(Shard(int(generation), int(number), int(rows), digest, path))
    return sorted(found)


def write_shard(
    disk: Disk, folder: Path, generation: int, number: int, lines: Sequence[bytes]
) -> Shard:
    """Commit `lines`; a commit that was cut off can be done again."""
    data = b"".join(lines)
    digest = hashlib.blake2b(data, digest_size=8).hexdigest()
    path = folder / f"part-{generation:03d}-{number:06d}-{len(lines)}-{digest}.jsonl"
    commit_file(disk, path, folder / SHARD_ASIDE, lambda sink: sink.write(data))
    return Shard(generation, number, len(lines), digest, path)
