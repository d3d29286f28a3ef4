"""The rows that an unfinished job was begun with: a file beside its shards, named by its digest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llmpq.jobs.records.disk import Disk, Sink, commit_file, file_digest, new_digest
from quant.common.errors import InputError

ROWS_ASIDE = "rows.part"
RECORD_BYTES = 26
"""Bytes of a row: 16 that stand for its id, 10 for prompt and sampling."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
_PREFIX = "rows-"
_READ_BYTES = RECORD_BYTES * 4096


def rows_digest(blocks: Iterable[bytes]) -> str:
    """Digest of records of rows, in their settled order."""
    seen = new_digest()
    for block in blocks:
        seen.update(block)
    return str(seen.hexdigest())


@dataclass(frozen=True)
class RowList:
    """The file of the rows of a digest."""

    folder: Path
    digest: str

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.folder / f"{_PREFIX}{self.digest}"

    def write(self, disk: Disk, blocks: Iterable[bytes]) -> None:
        """Write `blocks`, whose digest it is, unless the file exists."""

        def fill(sink: Sink) -> None:
            for block in blocks:
                sink.write(block)

        if not self.path.exists():
            commit_file(disk, self.path, self.folder / ROWS_ASIDE, fill)

    def blocks(self) -> Iterator[bytes]:
        """Records of rows, many at once; raises `InputError` for a damaged file."""
        try:
            is_whole = file_digest(self.path) == self.digest
        except OSError:
            is_whole = False
        if not is_whole:
            raise InputError(
                f"{self.path}, which tells the rows that the job was begun with, is damaged or "
                "missing, and this input is not known to have the same; pass --extend to keep what "
                "is done and do the other rows too, name another output or pass --overwrite"
            )
        with self.path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                yield block


def row_lists_in(folder: Path) -> list[Path]:
    """All lists of rows in a folder."""
    return [path for path in folder.iterdir() if is_row_list(path)]


def is_row_list(path: Path) -> bool:
    """Whether the name of `path` is that of a list of rows."""
    name = path.name
    return name.startswith(_PREFIX) and known_digest(name.removeprefix(_PREFIX)) is not None


def known_digest(content: object) -> str | None:
    """A digest as `rows_digest` gives it; None for anything else."""
    return content if isinstance(content, str) and _DIGEST.fullmatch(content) else None
