"""Rows of finished outputs: reading them back, and joining shards into one file or fewer shards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from llmpq.jobs.formats.csv_files import csv_lines, read_csv_results
from llmpq.jobs.formats.format import FileFormat, output_format
from llmpq.jobs.formats.parquet import read_results, require_pyarrow, write_results
from llmpq.jobs.formats.streams import compressed, contradiction, numbered_lines
from llmpq.jobs.records.files import Files, Sink, write_whole
from llmpq.jobs.records.ledger import Ledger
from llmpq.jobs.records.shards import Shard, write_shard
from llmpq.rows.results import Result
from quant.common.errors import InputError

FINISHED_FILE = 0
"""Source number of the finished file, before those of the shards."""

_KEYS = ("custom_id", "error", "fingerprint")
_FINGERPRINT = re.compile(r"[0-9a-f]{12}-[0-9a-f]{20}")
_REMEDY = "name another output or pass --overwrite"
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


def check_writable(named: Path, path: Path) -> None:
    """`InputError` for a format that cannot be written to `path`, which a link may have `named`."""
    found = output_format(path)
    if found != output_format(named):
        raise InputError(
            f"output {named} is a link to {path}, whose name stands for {found.name}; give both "
            "the same ending"
        )
    if found.rows == "parquet":
        require_pyarrow()
    elif found.compression == ".zst":
        require_pyarrow("Files that end in .zst")


def identities(path: Path) -> Iterator[Identity]:
    """Those of the rows of a finished file; `InputError` for a row that llmpq did not write, and
    for a file that is not what its name says. Raises one of `READ_ERRORS` for one that is damaged.
    """
    named = output_format(path)
    wrong = contradiction(path, named)
    if wrong is not None:
        raise InputError(f"output {path} exists already: {wrong}, {_REMEDY}")
    for number, row in enumerate(_finished_rows(path, named, _KEYS), start=1):
        found = identity(row)
        if found is None:
            raise InputError(
                f"output {path} exists already and its row {number} is no result of llmpq; "
                f"{_REMEDY}"
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
        named = output_format(target)
        if named.rows == "parquet":
            return write_whole(files, target, aside, lambda sink: write_results(sink, self._rows()))
        lines = self._lines() if named.rows == "jsonl" else csv_lines(self._rows())
        return write_whole(files, target, aside, lambda sink: _fill(sink, named, lines))

    def gone(self) -> Iterator[str]:
        """Ids of results, and no errors, that the ledger does not want."""
        found: list[Iterator[Identity | None]] = [
            map(identity, shard.lines()) for shard in self.shards
        ]
        if self.finished is not None:
            found.insert(0, identities(self.finished))
        for row in chain.from_iterable(found):
            if row is not None and not row.failed and self.ledger.wanted(row.custom_id) is None:
                yield row.custom_id

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

    def _lines(self) -> Iterator[bytes]:
        if self.finished is not None:
            lines = _lines(self.finished, output_format(self.finished))
            yield from self._kept(lines, FINISHED_FILE)
        for shard in self.shards:
            yield from self._kept(shard.lines(), shard.source)

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        if self.finished is not None:
            rows = _finished_rows(self.finished, output_format(self.finished), None)
            for line, row in enumerate(rows):
                if isinstance(row, Mapping) and self._counts(row, FINISHED_FILE, line):
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


def _finished_rows(
    path: Path, named: FileFormat, columns: Sequence[str] | None
) -> Iterator[object]:
    """Lines of JSON, or the rows of a table; of Parquet only `columns`, where they are named."""
    if named.rows == "parquet":
        return read_results(path, columns)
    if named.rows == "csv":
        return read_csv_results(path, named.compression)
    return _lines(path, named)


def _lines(path: Path, named: FileFormat) -> Iterator[bytes]:
    """Lines, each with its end: an editor may have dropped the last one's. One that is too long
    is none of llmpq's, and given as an empty one.
    """
    for _, line in numbered_lines(path, named.compression):
        if line is None or line.strip():
            line = line or b""
            yield line if line.endswith(b"\n") else line + b"\n"


def _fill(sink: Sink, named: FileFormat, lines: Iterator[bytes]) -> None:
    with compressed(sink, named.compression) as stream:
        block: list[bytes] = []
        size = 0
        for line in lines:
            block.append(line)
            size += len(line)
            if size >= _WRITE_BYTES:
                stream.write(b"".join(block))
                block, size = [], 0
        stream.write(b"".join(block))
