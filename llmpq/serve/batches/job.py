"""A batch as a job of the crash-safe store: each line has one result, whatever ends the server.

A line is a row whose text is the line itself, called by its number; the text of its result is the
line that answers it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from actors.sampling_options import GREEDY
from llmpq.jobs.formats.file_format import input_format
from llmpq.jobs.formats.streams import READ_ERRORS, contradiction, numbered_lines, reason
from llmpq.jobs.inputs import Content, JobInput
from llmpq.jobs.job import Job
from llmpq.jobs.output.job_output import JobOutput
from llmpq.jobs.output.options import OutputOptions
from llmpq.jobs.records.disk import Disk, Sink
from llmpq.jobs.records.manifest import JobIdentity
from llmpq.rows.ids import digest
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Row
from llmpq.serve.batches.lines import LineAnswer, custom_id_of
from llmpq.serve.batches.storage.records import Counts, Problem

MOST_LINES = 50_000
"""Requests of a batch, as in OpenAI's interface."""

SHARD_S = 2.0
"""Seconds between commits: what a kill costs at most, as lines that run again."""

_RESULTS = "results.jsonl"
_MODEL_HEX = 12


@dataclass(frozen=True)
class Line:
    """A line of the input by its number from 1; `problem` says why its content is missing."""

    number: int
    content: bytes
    problem: str | None = None


@dataclass(frozen=True)
class Scan:
    """What a reading of the whole input shows: `lines` that are not blank.

    `repeats`: numbers of lines whose id stands in the line given already. `problem`: why the file
    cannot be used.
    """

    lines: int = 0
    repeats: dict[int, int] = field(default_factory=dict)
    problem: Problem | None = None


def scan(path: Path, most_line_bytes: int) -> Scan:
    """Read the input of a batch; longer lines are not looked into."""
    seen: dict[bytes, int] = {}
    repeats: dict[int, int] = {}
    lines = objects = 0
    try:
        wrong = contradiction(path, input_format(path))
        if wrong is not None:
            return Scan(problem=Problem("invalid_file", f"the file cannot be used: {wrong}"))
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
                first = seen.setdefault(_key(custom_id), number)
                if first != number:
                    repeats[number] = first
    except READ_ERRORS as error:
        return Scan(problem=Problem("unreadable_file", f"the file is lost: {reason(error)}"))
    if not lines:
        return Scan(problem=Problem("empty_file", "the file has no lines; send one a request"))
    if not objects:
        message = "no line of the file is a JSON object; send JSON lines, one request each"
        return Scan(problem=Problem("invalid_json_line", message, 1))
    return Scan(lines, repeats)


def _key(custom_id: str) -> bytes:
    return blake2b(custom_id.encode(), digest_size=16).digest()


class BatchJob:
    """The job of the batch `name`, which reads `source` and keeps its results in `folder`.

    All methods are to be called in one thread. They raise `InputError` where the disk fails: what
    was committed is kept, and another `BatchJob` goes on from there.
    """

    def __init__(self, name: str, source: Path, folder: Path, disk: Disk) -> None:
        folder.mkdir(exist_ok=True)
        self._path = folder / _RESULTS
        options = OutputOptions(shard_s=SHARD_S)
        self._output = JobOutput(self._path, options, disk=disk).__enter__()
        try:
            identity = JobIdentity(digest({"batch": name}, _MODEL_HEX), name, GREEDY)
            self._job = Job(JobInput((source,), (source.name,), _row_of), self._output, identity)
        except BaseException:
            self._output.__exit__(None, None, None)
            raise
        tally = self._job.tally
        self._lines = tally.rows
        self._failed = tally.resumed_errors
        self._completed = tally.resumed - tally.resumed_errors

    @property
    def counts(self) -> Counts:
        """Lines that have results."""
        return Counts(self._lines, self._completed, self._failed)

    def todo(self) -> Iterator[Line]:
        """The lines that have no result yet."""
        for row in self._job.todo():
            number = int(row.custom_id)
            if isinstance(row, BadRow):
                yield Line(number, b"", row.error)
            else:
                yield Line(number, (row.text or "").encode("utf-8", "surrogateescape"))

    def write(self, line: Line, answer: LineAnswer) -> None:
        """Keep the result of a line; of two the first stays."""
        if self._job.write(Result(str(line.number), answer.text, (), None, answer.error)):
            self._completed += answer.error is None
            self._failed += answer.error is not None

    def finish(self) -> None:
        """Put the results of all lines together."""
        self._job.finish()

    def close(self) -> None:
        """Commit what there is."""
        self._output.__exit__(None, None, None)

    def results(self, wanted: Callable[[str | None], bool]) -> Iterator[bytes]:
        """Lines of finished results whose code of error is `wanted`."""
        with self._path.open("rb") as file:
            for line in file:
                row = json.loads(line)
                if wanted(row["error"]):
                    yield row["text"].encode() + b"\n"


def fill_with(lines: Iterator[bytes]) -> Callable[[Sink], None]:
    """Writes `lines` to a file."""

    def fill(sink: Sink) -> None:
        for line in lines:
            sink.write(line)

    return fill


def _row_of(content: Content, place: str) -> Row | BadRow:
    number = place.rpartition(":")[2]
    if isinstance(content, bytes):
        return Row(number, text=content.decode("utf-8", "surrogateescape"))
    return BadRow(number, str(content))
