"""The files of a job's results: noting what earlier runs left in them, and joining them."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from llmpq.jobs.file_format import READ_ERRORS, FileFormat, compressed, output_format, reason
from llmpq.jobs.job_files import DAMAGED_SUFFIX, Disk, Shard, Sink, commit_file, write_shard
from llmpq.jobs.parquet import ColumnKinds, write_results
from llmpq.jobs.result_lines import (
    OutputOptions,
    ResultIdentity,
    finished_lines,
    finished_rows,
    line_of,
    openai_line,
    result_identities,
    result_identity,
)
from llmpq.jobs.row_database import Done, RowDatabase
from llmpq.jobs.store import JobStore, Manifest
from llmpq.jobs.text_files import csv_lines
from llmpq.rows.results import Result
from quant.common.errors import InputError

FINISHED_FILE = 0
"""Source number of the finished file, before those of the shards."""

_LINES_AT_ONCE = 64


@dataclass(frozen=True)
class ResultFiles:
    """All lines of a job, in the finished file `output`, if it `is_there`, and in shards."""

    output: Path
    is_there: bool
    shards: tuple[Shard, ...]
    database: RowDatabase

    def note(self, manifest: Manifest, retry_errors: bool, disk: Disk) -> None:
        """Note all rows in the database; a damaged shard is set aside.

        With `retry_errors`, errors are forgotten, so that their rows run again. Raises `InputError`
        for a file that cannot be read to its end, and for a result of another model or of another
        form than those of `manifest`.
        """

        def noted(rows: Iterable[ResultIdentity], source: int) -> Iterator[tuple[str, Done]]:
            for line, row in enumerate(rows):
                self._check(row, manifest)
                forgotten = retry_errors and row.failed
                yield row.custom_id, Done(row.fingerprint, row.failed, source, line, forgotten)

        if self.is_there:
            try:
                self.database.record_all(noted(result_identities(self.output), FINISHED_FILE))
            except READ_ERRORS as error:
                raise InputError(
                    f"cannot read output {self.output}: {reason(error)}; name another output, or "
                    "remove it or pass --overwrite to generate its rows again"
                ) from error
        for shard in self.shards:
            found = list(map(result_identity, shard.lines())) if shard.is_whole() else [None]
            rows = [row for row in found if row is not None]
            if len(rows) < len(found):
                _set_aside(shard, disk)
            else:
                self.database.record_all(noted(rows, shard.source))

    def _check(self, row: ResultIdentity, manifest: Manifest) -> None:
        if row.model != manifest.model:
            raise InputError(
                f"output {self.output} was made by another model (row {row.custom_id!r:.80}) "
                f"than {manifest.model_name}; name another output or pass --overwrite"
            )
        if row.form != manifest.output_format:
            raise InputError(
                f"output {self.output} holds lines of another output_format; pass "
                f"--output_format {row.form}, name another output or pass --overwrite"
            )

    def write(self, disk: Disk, aside: Path) -> str:
        """Replace the output by a file of all lines, whole or not at all; returns its digest."""
        named = output_format(self.output)
        own = ColumnKinds()
        if named.rows != "jsonl":
            own.note(self._rows())  # a table's columns stand before its rows

        def fill(sink: Sink) -> None:
            if named.rows == "parquet":
                write_results(sink, self._rows(), own)
            elif named.rows == "csv":
                _fill(sink, named, csv_lines(self._rows(), tuple(own.kinds)))
            else:
                _fill(sink, named, self._lines())

        return commit_file(disk, self.output, aside, fill)

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

    def without_row(self) -> Iterator[str]:
        """Ids of results, and no errors, that the database does not want."""
        for row in self._identities():
            if row is not None and not row.failed and self.database.wanted(row.custom_id) is None:
                yield row.custom_id

    def all(self) -> Iterator[object]:
        """Lines of JSON, or rows of a table, those that do not count too."""
        if self.is_there:
            yield from finished_rows(self.output, output_format(self.output), None)
        for shard in self.shards:
            yield from shard.lines()

    def _identities(self) -> Iterator[ResultIdentity | None]:
        if self.is_there:
            yield from result_identities(self.output)
        for shard in self.shards:
            yield from map(result_identity, shard.lines())

    def _lines(self) -> Iterator[bytes]:
        if self.is_there:
            lines = finished_lines(self.output, output_format(self.output))
            yield from self._kept(lines, FINISHED_FILE)
        for shard in self.shards:
            yield from self._kept(shard.lines(), shard.source)

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        if self.is_there:
            rows = finished_rows(self.output, output_format(self.output), None)
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


def _set_aside(shard: Shard, disk: Disk) -> None:
    aside = shard.path.with_name(shard.path.name + DAMAGED_SUFFIX)
    disk.rename(shard.path, aside)
    warnings.warn(
        f"{shard.path} is damaged: its {shard.rows} rows are generated again, the file is "
        f"kept as {aside.name}",
        stacklevel=2,
    )


def _fill(sink: Sink, named: FileFormat, lines: Iterator[bytes]) -> None:
    with compressed(sink, named.compression) as stream:
        while block := list(islice(lines, _LINES_AT_ONCE)):
            stream.write(b"".join(block))


SHARD_BYTES = 2**24
"""Bytes of a shard's lines, which wait in memory."""


class ShardWriter:
    """Writes results in shards from `number` on, the `manifest` before the first of them.

    Methods raise the OSError that has kept a shard from being written, also of a commit by time,
    and may be called from several threads.
    """

    def __init__(
        self,
        store: JobStore,
        manifest: Manifest,
        database: RowDatabase,
        number: int,
        options: OutputOptions,
    ) -> None:
        self.manifest = manifest
        self.committed = 0
        self.begun = False
        self.failure: OSError | None = None
        self._store = store
        self._database = database
        self._number = number
        self._options = options
        self._lines: list[bytes] = []
        self._bytes = 0
        self._mutex = threading.Lock()
        self._closed = threading.Event()

    def start(self) -> None:
        """Commit every `shard_s` seconds from now on, also while no rows come."""
        if self._options.shard_s is not None:
            threading.Thread(target=self._commit_by_time, daemon=True).start()

    def write(self, result: Result, is_chat: bool) -> bool:
        """As `JobOutput.write`; raises `InputError` for an id that is not in the database."""
        with self._mutex:
            self._raise_failure()
            fingerprint = self._database.wanted(result.custom_id)
            if fingerprint is None:
                raise InputError(f"row {result.custom_id!r:.80} was not there when the job began")
            failed = result.error is not None
            done = Done(fingerprint, failed, self._number + 1, len(self._lines))
            if not self._database.record(result.custom_id, done):
                return False
            if self.manifest.output_format == "rows":
                line = line_of(result, fingerprint)
            else:
                line = openai_line(result, fingerprint, self.manifest.model_name, is_chat)
            self._lines.append(line)
            self._bytes += len(line)
            if len(self._lines) >= self._options.shard_rows or self._bytes >= SHARD_BYTES:
                self._commit()
            return True

    def commit(self) -> None:
        with self._mutex:
            self._raise_failure()
            self._commit()

    def stop(self) -> None:
        self._closed.set()

    def _commit(self) -> None:
        if not self._lines:
            return
        store, lines = self._store, self._lines
        try:
            if not self.begun:
                store.begin(self.manifest, self._database.row_blocks())
                self.begun = True
            write_shard(store.disk, store.path, self.manifest.generation, self._number, lines)
        except OSError as error:
            self.failure = error
            raise
        self.committed += len(lines)
        self._lines, self._bytes = [], 0
        self._number += 1

    def _commit_by_time(self) -> None:
        while not self._closed.wait(self._options.shard_s):
            with self._mutex, suppress(OSError):  # the next call raises it
                if self.failure is None:
                    self._commit()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
