"""A batch as a job of the crash-safe store: each line has one result, whatever ends the server.

A line is a row whose text is the line itself, called by its number; the text of its result is the
line that answers it. At the end of the batch the results become files of output and of errors.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

from actors.sampling_options import GREEDY
from llmpq.jobs.file_format import READ_ERRORS, contradiction, input_format, numbered_lines, reason
from llmpq.jobs.inputs import Content, JobInput
from llmpq.jobs.job import OpenJob
from llmpq.jobs.job_files import Disk, file_digest, shards_in
from llmpq.jobs.job_output import JobOutput
from llmpq.jobs.result_lines import OutputOptions, result_identity
from llmpq.jobs.row_database import id_key
from llmpq.jobs.store import MODEL_HEX, JobIdentity
from llmpq.jobs.text_files import is_whole_json
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Row, digest
from llmpq.serve.batches.lines import EXPIRED, BatchLine, LineAnswer, Scan, custom_id_of
from llmpq.serve.batches.records import Batch, LineCounts, Problem, Status, StoredFile, set_aside
from llmpq.serve.batches.store import BatchStore
from quant.common.errors import InputError
from quant.common.json_text import loads

MOST_LINES = 50_000
"""Requests of a batch, as in OpenAI's interface."""

SHARD_S = 2.0
"""Seconds between commits: what a kill costs at most, as lines that run again."""

_RESULTS = "results.jsonl"
_NO_LINES = "no line of the file is a JSON object; send JSON lines, one request each"
_CHANGED = "the file's content is not what was sent, it has changed on the server; send it again"
_LIES_OTHERWISE = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
_LOG = logging.getLogger(__name__)

Results = Callable[[], Iterator[LineAnswer]]


def scan(path: Path, most_line_bytes: int, digest: str | None) -> Scan:
    """Read a batch's input, but not longer lines; `digest`: of what was sent. Raises OSError."""
    seen: dict[bytes, int] = {}
    repeats: dict[int, int] = {}
    lines = objects = 0
    try:
        if digest is not None and file_digest(path) != digest:
            return Scan(problem=Problem("changed_file", _CHANGED))
        wrong = contradiction(path, input_format(path))
        if wrong is not None:
            return Scan(problem=Problem("invalid_file", f"the file cannot be used: {wrong}"))
        if is_whole_json(path, ""):
            return Scan(problem=Problem("invalid_json_line", _NO_LINES, 1))
        for number, line in numbered_lines(path, ""):
            if line is not None and not line.strip():
                continue
            lines += 1
            if lines > MOST_LINES:
                message = f"the file has more than {MOST_LINES} lines; split it"
                return Scan(problem=Problem("too_many_lines", message, number))
            if line is None or len(line) > most_line_bytes:
                objects += 1  # it may be one
                continue
            objects += line.lstrip().startswith(b"{")
            custom_id = custom_id_of(line)
            if custom_id is not None:
                first = seen.setdefault(id_key(custom_id), number)
                if first != number:
                    repeats[number] = first
    except READ_ERRORS as error:
        if may_pass(error):
            raise
        return Scan(problem=Problem("unreadable_file", f"the file is lost: {reason(error)}"))
    if not lines:
        return Scan(problem=Problem("empty_file", "the file has no lines; send one a request"))
    if not objects:
        return Scan(problem=Problem("invalid_json_line", _NO_LINES, 1))
    return Scan(lines, repeats)


def may_pass(error: BaseException) -> bool:
    """Whether a fault may pass by itself: one of a full or failing disk, not of what lies on it."""
    cause = error if isinstance(error, OSError) else error.__cause__
    is_of_disk = isinstance(cause, OSError | sqlite3.OperationalError)
    return is_of_disk and not isinstance(cause, _LIES_OTHERWISE)


class BatchJob:
    """The job of the batch `name`, which reads `source` and keeps its results in `folder`.

    All methods are to be called in one thread. They raise `InputError` where the disk fails: what
    was committed is kept, and another `BatchJob` goes on from there.
    """

    def __init__(self, name: str, source: Path, folder: Path, disk: Disk) -> None:
        folder.mkdir(exist_ok=True)
        self._path = folder / _RESULTS
        if self._path.is_dir():
            raise InputError(f"{self._path} is a folder in place of a file of results")
        options = OutputOptions(shard_s=SHARD_S)
        identity = JobIdentity(_model(name), name, GREEDY)
        with ExitStack() as undo:
            output = undo.enter_context(JobOutput(self._path, options, disk=disk))
            self._job = OpenJob(JobInput((source,), (source.name,), _row_of), output, identity)
            self.close = undo.pop_all().close
        tally = self._job.tally
        self._lines = tally.rows
        self._failed = tally.resumed_errors
        self._completed = tally.resumed - tally.resumed_errors

    @property
    def counts(self) -> LineCounts:
        return LineCounts(self._lines, self._completed, self._failed)

    def todo(self) -> Iterator[BatchLine]:
        for row in self._job.todo():
            number = int(row.custom_id)
            if isinstance(row, BadRow):
                yield BatchLine(number, b"", row.error)
            else:
                yield BatchLine(number, (row.text or "").encode("utf-8", "surrogateescape"))

    def write(self, line: BatchLine, answer: LineAnswer) -> None:
        if self._job.write(Result(str(line.number), answer.text, (), None, answer.error)):
            self._completed += answer.error is None
            self._failed += answer.error is not None

    def finish(self) -> None:
        self._job.finish()

    def results(self) -> Iterator[LineAnswer]:
        with self._path.open("rb") as file:
            for row in map(json.loads, file):
                yield LineAnswer(row["text"], row["error"])


def results_so_far(name: str, folder: Path) -> Iterator[LineAnswer]:
    """Results of the batch `name` in a folder of which any part may be damaged."""
    seen: set[str] = set()
    for line in _undamaged_lines(folder):
        try:
            row = loads(line)
            found = result_identity(row)
            if found is None or found.model != _model(name) or found.custom_id in seen:
                continue
            loads(row["text"])
        except (ValueError, TypeError):
            continue
        seen.add(found.custom_id)
        yield LineAnswer(row["text"], row["error"])


def _undamaged_lines(folder: Path) -> Iterator[bytes]:
    """Lines of finished results and of whole shards, as far as they can be read."""

    def of_shards() -> Iterator[bytes]:
        for shard in shards_in(folder / f"{_RESULTS}.job"):
            if shard.is_whole():
                yield from shard.lines()

    def of_file() -> Iterator[bytes]:
        with (folder / _RESULTS).open("rb") as file:
            yield from file

    for lines in (of_file(), of_shards()):
        try:
            yield from lines
        except OSError as error:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                _LOG.error("%s: results cannot be read: %s", folder, error.strerror)


def _model(name: str) -> str:
    """What stands for the model in the records of the batch `name`, which are then of no other."""
    return digest({"batch": name}, MODEL_HEX)


def _row_of(content: Content, place: str) -> Row | BadRow:
    number = place.rpartition(":")[2]
    if isinstance(content, bytes):
        return Row(number, text=content.decode("utf-8", "surrogateescape"))
    return BadRow(number, str(content))


def finish_batch(store: BatchStore, batch_id: str, job: BatchJob, now_s: int) -> None:
    """Write the files of a batch that is done, then its end; again if cut off on the way."""
    batch = _with_files(store, batch_id, job.results, job.counts, now_s)
    store.batches.put(batch.turned(_last_status(batch, job), now_s))


def fail_batch(store: BatchStore, batch_id: str, problem: Problem, now_s: int) -> None:
    """Note why a batch cannot go on, give out the answers it has, and set its folder aside."""
    folder = store.job_path(batch_id)
    results = partial(results_so_far, batch_id, folder)
    errors = [each.error is not None for each in results()]
    batch = store.batch(batch_id)
    counts = batch.request_counts
    if errors:
        failed = sum(errors)
        total = max(counts.total, len(errors))
        counts = LineCounts(total, len(errors) - failed, failed)
    batch = _with_files(store, batch_id, results, counts, now_s)
    store.batches.put(replace(batch.turned("failed", now_s), problems=(problem,)))
    set_aside(store.disk, folder)


def _last_status(batch: Batch, job: BatchJob) -> Status:
    if batch.status == "cancelling":
        return "cancelled"
    is_expired = any(each.error == EXPIRED for each in job.results())
    return "expired" if is_expired else "completed"


def _with_files(
    store: BatchStore, batch_id: str, results: Results, counts: LineCounts, now_s: int
) -> Batch:
    """The batch with files of its results; those that an earlier end has written stay."""
    batch = replace(store.batch(batch_id), request_counts=counts)
    output = _write(store, batch, results, now_s, is_output=True)
    error = _write(store, batch, results, now_s, is_output=False)
    return replace(batch, output_file_id=output, error_file_id=error)


def _write(
    store: BatchStore, batch: Batch, results: Results, now_s: int, is_output: bool
) -> str | None:
    """The id of the file of output or errors, None where there is nothing for it."""
    kind = "output" if is_output else "error"
    file_id = f"file-{blake2b(f'{kind} {batch.id}'.encode(), digest_size=16).hexdigest()}"

    def wanted() -> Iterator[bytes]:
        of_kind = (each for each in results() if (each.error is None) is is_output)
        return (each.text.encode() + b"\n" for each in of_kind)

    if not any(True for _ in wanted()):
        return file_id if store.files.get(file_id) else None
    file = StoredFile(
        id=file_id,
        number=store.files.next_number,
        bytes=0,
        created_at=now_s,
        filename=f"{batch.id}_{kind}.jsonl",
        purpose="batch_output",
        expires_at=None if batch.output_s is None else now_s + batch.output_s,
    )
    store.write_output(file, wanted())
    return file_id
