"""Joining the shards of a job into one file, or into fewer shards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from llmpq.jobs.formats.column_kinds import ColumnKinds
from llmpq.jobs.formats.csv_files import csv_lines
from llmpq.jobs.formats.file_format import FileFormat, output_format
from llmpq.jobs.formats.parquet import write_results
from llmpq.jobs.formats.streams import compressed
from llmpq.jobs.output.result_rows import (
    ResultIdentity,
    finished_lines,
    finished_rows,
    result_identities,
    result_identity,
)
from llmpq.jobs.records.disk import Disk, Sink, commit_file
from llmpq.jobs.records.row_database import RowDatabase
from llmpq.jobs.records.shards import Shard, write_shard

FINISHED_FILE = 0
"""Source number of the finished file, before those of the shards."""

_WRITE_BYTES = 2**17


@dataclass(frozen=True)
class JoinedResults:
    """All lines of a job, of which its output keeps one for each id."""

    finished: Path | None
    shards: tuple[Shard, ...]
    database: RowDatabase

    def write(self, disk: Disk, target: Path, aside: Path) -> str:
        """Replace `target` by a file of them, whole or not at all; returns its digest."""
        named = output_format(target)
        if named.rows == "jsonl":
            lines = self._lines()
            return commit_file(disk, target, aside, lambda sink: _fill(sink, named, lines))
        own = ColumnKinds()
        own.note(self._rows())  # a table's columns stand before its rows
        if named.rows == "parquet":
            rows = self._rows()
            return commit_file(disk, target, aside, lambda sink: write_results(sink, rows, own))
        lines = csv_lines(self._rows(), own.names)
        return commit_file(disk, target, aside, lambda sink: _fill(sink, named, lines))

    def results_without_row(self) -> Iterator[str]:
        """Ids of results, and no errors, that the database does not want."""
        found: list[Iterator[ResultIdentity | None]] = [
            map(result_identity, shard.lines()) for shard in self.shards
        ]
        if self.finished is not None:
            found.insert(0, result_identities(self.finished))
        for row in chain.from_iterable(found):
            if row is not None and not row.failed and self.database.wanted(row.custom_id) is None:
                yield row.custom_id

    def compact(self, disk: Disk, folder: Path, generation: int) -> None:
        """Rewrite those shards that hold lines which do not count."""
        number = max((shard.number for shard in self.shards), default=-1) + 1
        for shard in self.shards:
            kept = list(self._kept(shard.lines(), shard.source))
            if len(kept) < shard.rows:
                if kept:
                    write_shard(disk, folder, generation, number, kept)
                    number += 1
                disk.unlink(shard.path)

    def _lines(self) -> Iterator[bytes]:
        if self.finished is not None:
            lines = finished_lines(self.finished, output_format(self.finished))
            yield from self._kept(lines, FINISHED_FILE)
        for shard in self.shards:
            yield from self._kept(shard.lines(), shard.source)

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        if self.finished is not None:
            rows = finished_rows(self.finished, output_format(self.finished), None)
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
        if not self.database.replaced:
            return True
        found = result_identity(row)
        return found is not None and self.database.counts(found.custom_id, source, line)


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
