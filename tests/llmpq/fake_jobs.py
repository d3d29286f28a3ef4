"""Jobs without a model, and a disk that fails when it is told to."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from actors.messages import Sampling
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import JobOptions, OpenJob, finished_tally
from llmpq.jobs.job_files import Disk
from llmpq.jobs.job_output import JobOutput
from llmpq.jobs.result_lines import OutputOptions
from llmpq.jobs.row_database import Tally
from llmpq.jobs.store import JobIdentity
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Row

IDENTITY = JobIdentity("0123456789ab", "fake-model", Sampling(max_new_tokens=8))
SMALL_SHARDS = OutputOptions(shard_rows=2, shard_s=None)
OVERWRITE = replace(SMALL_SHARDS, overwrite=True)
RESUME = replace(SMALL_SHARDS, resume=True)
EXTEND = JobOptions(extend=True)

FaultMode = Literal["torn", "after", "full"]


class Crash(BaseException):
    """The process has been killed, or the power is off."""


class QuickDisk(Disk):
    """Without waiting for the disk."""

    def fsync(self, descriptor: int) -> None:
        """Nothing."""


class FaultyDisk(QuickDisk):
    """Fails at call number `fail_at`: dies in the middle of it (`torn`: half is written, or nothing
    is done) or after it, or finds the disk full. Who dies loses what was not brought to the disk.
    """

    def __init__(self, fail_at: int, mode: FaultMode) -> None:
        self.calls = 0
        self._fail_at, self._mode = fail_at, mode
        self._dead = False
        self._paths: dict[int, Path] = {}
        self._unsynced: set[Path] = set()
        self._undo: list[tuple[Path, Path | None, Path, bytes | None]] = []

    def _call(self, perform: Any, torn: Any = lambda: None) -> Any:
        if self._dead:
            raise Crash
        self.calls += 1
        if self.calls != self._fail_at:
            return perform()
        if self._mode == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if self._mode == "after":
            perform()
        elif self._mode == "torn":
            torn()
        self._dead = True
        self._lose()
        raise Crash

    def _lose(self) -> None:
        for _, source, target, before in reversed(self._undo):
            if source is not None:
                source.write_bytes(target.read_bytes())
                if target in self._unsynced:
                    self._unsynced.add(source)
            if before is None:
                target.unlink()
            else:
                target.write_bytes(before)
        for path in self._unsynced:
            if path.exists():
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def open_new(self, path: Path) -> int:
        def perform() -> int:
            descriptor = Disk.open_new(self, path)
            self._paths[descriptor] = path
            self._unsynced.add(path)
            return descriptor

        return int(self._call(perform))

    def write(self, descriptor: int, data: Any) -> int:
        half = memoryview(data)[: max(1, len(data) // 2)]
        return int(
            self._call(
                lambda: Disk.write(descriptor, data),
                lambda: Disk.write(descriptor, half),
            )
        )

    def fsync(self, descriptor: int) -> None:
        self._call(lambda: self._unsynced.discard(self._paths[descriptor]))

    def close(self, descriptor: int) -> None:
        try:
            self._call(lambda: None)
        finally:
            Disk.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        def perform() -> None:
            before = target.read_bytes() if target.exists() else None
            self._undo.append((target.parent, source, target, before))
            Disk.rename(source, target)
            if source in self._unsynced:
                self._unsynced.add(target)

        self._call(perform)

    def unlink(self, path: Path) -> None:
        def perform() -> None:
            if path.exists():
                self._undo.append((path.parent, None, path, path.read_bytes()))
            Disk.unlink(self, path)

        self._call(perform)

    def make_folder(self, path: Path) -> None:
        self._call(lambda: Disk.make_folder(self, path))

    def sync_folder(self, folder: Path) -> None:
        def perform() -> None:
            self._undo = [entry for entry in self._undo if entry[0] != folder]

        self._call(perform)


def answer(rows: Iterable[Row | BadRow]) -> Iterator[Result]:
    """What the model says: the prompt backwards; a prompt that begins with `bad` fails."""
    for row in rows:
        if isinstance(row, BadRow):
            yield Result(row.custom_id, None, (), None, row.error, row.columns)
        elif (row.text or "").startswith("bad"):
            yield Result(row.custom_id, None, (), None, "failed", row.columns)
        else:
            text = (row.text or "")[::-1]
            yield Result(row.custom_id, text, tuple(text.encode()), "stop", None, row.columns)


def run_job(
    source: Path,
    target: str | Path,
    options: OutputOptions = SMALL_SHARDS,
    disk: Disk | None = None,
    job_options: JobOptions | None = None,
    identity: JobIdentity = IDENTITY,
    limit: int | None = None,
) -> Tally:
    """Run a job to its end, or until `limit` rows are written."""
    output = JobOutput(target, options, (source,), disk or QuickDisk())
    found = JobInput.find([source])
    with output:
        done = finished_tally(found, output, identity, job_options or JobOptions())
        if done is not None:
            return done
        job = OpenJob(found, output, identity, job_options)
        for number, result in enumerate(answer(job.todo())):
            if number == limit:
                return job.tally
            job.write(result)
        job.finish()
    return job.tally


def write_prompts(path: Path, *rows: Any) -> Path:
    """A JSONL file; strings are lines as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def read_rows(*paths: str | Path) -> tuple[Row | BadRow, ...]:
    """All rows of files, folders or globs."""
    return tuple(placed.row for placed in JobInput.find(paths).rows())


def prompts(count: int, first: int = 0) -> list[dict[str, str]]:
    """Rows with ids `q0` and on."""
    return [{"custom_id": f"q{i}", "prompt": f"prompt {i}"} for i in range(first, first + count)]


def content_of(path: Path) -> str:
    """Of a file, decompressed as its ending says."""
    if path.suffix == ".zst":
        with pa.input_stream(str(path), compression="zstd") as file:
            return bytes(file.read()).decode()
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def csv_result(row: dict[str, Any]) -> dict[str, Any]:
    """A row of results from its cells."""
    failed = not row["finish_reason"]
    row["token_ids"] = json.loads(row["token_ids"])
    row["text"] = None if failed else row["text"]
    return row | {name: row[name] or None for name in ("finish_reason", "error")}


def results_in(target: Path) -> dict[str, dict[str, Any]]:
    """Results by id, of a file or of a folder of shards; every id must be there once."""
    if target.is_dir():
        paths = sorted(target.glob("part-*.jsonl"))
        rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    elif target.suffix == ".parquet":
        rows = pq.read_table(target).to_pylist()
    elif ".csv" in target.suffixes:
        rows = [csv_result(row) for row in csv.DictReader(io.StringIO(content_of(target), ""))]
    else:
        rows = [json.loads(line) for line in content_of(target).splitlines()]
    by_id = {row["custom_id"]: row for row in rows}
    assert len(by_id) == len(rows), "an id twice"
    return by_id
