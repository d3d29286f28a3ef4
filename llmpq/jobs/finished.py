"""Rows of finished outputs: reading them back, and joining shards into one file or fewer shards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmpq.jobs.files import Files, Sink, write_whole
from llmpq.jobs.ledger import Ledger
from llmpq.jobs.parquet import read_results, write_results
from llmpq.jobs.shards import Shard, write_shard
from llmpq.results import Result
from quant.errors import InputError

FINISHED_FILE = 0
"""Source number of the finished file, before those of the shards."""

_KEYS = ("custom_id", "error", "fingerprint")
_FINGERPRINT = re.compile(r"[0-9a-f]{12}-[0-9a-f]{20}")
_WRITE_BYTES = 2**17
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class Identity:
    """What a row of results says about itself."""

    custom_id: str
    failed: bool
    fingerprint: str

    @property
    def model(self) -> str:
        """Digest of the model that made it."""
        return self.fingerprint.partition("-")[0]


def line_of(result: Result, fingerprint: str) -> bytes:
    """A row of results as a line of JSON."""
    row = result.as_dict() | {"fingerprint": fingerprint}
    return _ENCODE(row).encode() + b"\n"


def is_parquet(path: Path) -> bool:
    """By its name."""
    return path.suffix == ".parquet"


def identities(path: Path) -> Iterator[Identity]:
    """Those of the rows of a finished file; `InputError` for a row that llmpq did not write."""
    rows: Iterable[object]
    rows = read_results(path, _KEYS) if is_parquet(path) else _lines(path)
    for number, row in enumerate(rows, start=1):
        found = identity(row)
        if found is None:
            raise InputError(
                f"output {path} exists already and its row {number} is no result of llmpq; name "
                "another output or pass --overwrite"
            )
        yield found


def identity(row: object) -> Identity | None:
    """Of a line or a row; None if it is no result of llmpq."""
    if isinstance(row, bytes):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError):
            return None
    if not isinstance(row, Mapping) or any(key not in row for key in _KEYS):
        return None
    custom_id, error, fingerprint = (row[key] for key in _KEYS)
    if not isinstance(custom_id, str) or not isinstance(fingerprint, str):
        return None
    if not _FINGERPRINT.fullmatch(fingerprint) or not isinstance(error, str | None):
        return None
    return Identity(custom_id, error is not None, fingerprint)


@dataclass(frozen=True)
class Join:
    """All lines of a job, of which its output keeps one for each id."""

    finished: Path | None
    shards: tuple[Shard, ...]
    ledger: Ledger

    def write(self, files: Files, target: Path, aside: Path) -> str:
        """Write them to `target`, in the place of what was there, at once; returns its digest."""
        if is_parquet(target):
            return write_whole(files, target, aside, lambda sink: write_results(sink, self._rows()))
        return write_whole(files, target, aside, self._fill)

    def compact(self, files: Files, folder: Path, generation: int) -> None:
        """Write those shards anew that hold lines which do not count."""
        number = max((shard.number for shard in self.shards), default=-1) + 1
        for shard in self.shards:
            kept = list(self._kept(shard.lines(), shard.source))
            if len(kept) < shard.rows:
                if kept:
                    write_shard(files, folder, generation, number, kept)
                    number += 1
                files.unlink(shard.path)

    def _fill(self, sink: Sink) -> None:
        block: list[bytes] = []
        size = 0
        for line in self._lines():
            block.append(line)
            size += len(line)
            if size >= _WRITE_BYTES:
                sink.write(b"".join(block))
                block, size = [], 0
        sink.write(b"".join(block))

    def _lines(self) -> Iterator[bytes]:
        if self.finished is not None:
            yield from self._kept(_lines(self.finished), FINISHED_FILE)
        for shard in self.shards:
            yield from self._kept(shard.lines(), shard.source)

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        if self.finished is not None:
            for line, row in enumerate(read_results(self.finished, None)):
                if self._counts(row, FINISHED_FILE, line):
                    yield row
        for shard in self.shards:
            yield from map(json.loads, self._kept(shard.lines(), shard.source))

    def _kept(self, lines: Iterable[bytes], source: int) -> Iterator[bytes]:
        for number, line in enumerate(lines):
            if self._counts(line, source, number):
                yield line

    def _counts(self, row: object, source: int, line: int) -> bool:
        if not self.ledger.replaced:
            return True
        found = identity(row)
        return found is not None and self.ledger.counts(found.custom_id, source, line)


def _lines(path: Path) -> Iterator[bytes]:
    """Lines, each with its end: an editor may have dropped the last one's."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield line if line.endswith(b"\n") else line + b"\n"
