"""Errors among the results of a job, by kind, as its files tell them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from llmpq.jobs.formats.file_format import READ_ERRORS, output_format
from llmpq.jobs.job_files import Shard
from llmpq.jobs.journal.error_kinds import ErrorCounts, ErrorKind
from llmpq.jobs.overview.places import JobPlace
from llmpq.jobs.result_lines import error_of, finished_rows, is_openai_line
from quant.common.errors import InputError
from quant.common.text import printable

BUDGET_S = 1.0
"""Seconds of reading at most: files may have gigabytes."""

_TEXT = 800  # characters
_NO_ERROR = b'"error": null'
_ID = re.compile(rb'\{"custom_id": ("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True)
class ResultErrors:
    """Rows that were read, the kinds of errors among them, and whether those are all rows."""

    rows: int
    kinds: tuple[ErrorKind, ...]
    is_whole: bool

    @property
    def errors(self) -> int:
        """Rows in error."""
        return sum(kind.count for kind in self.kinds)


def read_errors(
    place: JobPlace,
    shards: Iterable[Shard],
    with_file: bool,
    clock: Callable[[], float] = time.monotonic,
) -> ResultErrors:
    """The errors in the results, as far as they can be read in `BUDGET_S`.

    `with_file`: the finished file counts too. Of two results of a row the later one counts.
    """
    deadline = clock() + BUDGET_S
    failed: dict[bytes, tuple[str, str]] = {}
    rows = 0
    try:
        for line in _lines(place, shards, with_file):
            rows += 1
            _note(line, failed)
            if rows % 256 == 0 and clock() > deadline:
                return ResultErrors(rows, _kinds(failed), False)
    except (*READ_ERRORS, InputError):
        return ResultErrors(rows, _kinds(failed), False)
    return ResultErrors(rows, _kinds(failed), True)


def _lines(place: JobPlace, shards: Iterable[Shard], with_file: bool) -> Iterator[object]:
    if with_file:
        named = output_format(place.output)
        yield from finished_rows(place.output, named, ("custom_id", "error", "fingerprint"))
    for shard in shards:
        yield from shard.lines()


def _note(row: object, failed: dict[bytes, tuple[str, str]]) -> None:
    if isinstance(row, bytes):
        if _NO_ERROR in row:
            if failed and (found := _ID.match(row)):
                failed.pop(found[1], None)
            return
        try:
            row = json.loads(row)
        except (ValueError, RecursionError):
            return
    if not isinstance(row, Mapping):
        return
    custom_id, error = str(row.get("custom_id")), row.get("error")
    if is_openai_line(row):
        error = error_of(row)
    key = json.dumps(custom_id, ensure_ascii=False).encode("utf-8", "surrogatepass")
    if isinstance(error, str):
        failed[key] = (custom_id, error)
    else:
        failed.pop(key, None)


def _kinds(failed: dict[bytes, tuple[str, str]]) -> tuple[ErrorKind, ...]:
    counts = ErrorCounts()
    for custom_id, error in failed.values():
        counts.add(printable(custom_id, _TEXT), printable(error, _TEXT))
    return counts.most_first()
