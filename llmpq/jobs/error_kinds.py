"""Errors of rows by kind: messages that differ only in their numbers and names are of one kind."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmpq.jobs.formats.file_format import READ_ERRORS, output_format
from llmpq.jobs.job_files import Shard
from llmpq.jobs.result_lines import error_of, finished_rows, is_openai_line
from quant.common.errors import InputError
from quant.common.text import printable

MOST_KINDS = 40
"""Kinds that are told apart; what comes after them is of one kind, `OTHERS`."""

OTHERS = "other errors"

_KIND_CHARACTERS = 160
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_NUMBER = re.compile(r"(?<![\w…])[+−-]?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?")

BUDGET_S = 1.0
"""Seconds of reading at most: files may have gigabytes."""

_TEXT = 800  # characters
_NO_ERROR = b'"error": null'
_ID = re.compile(rb'\{"custom_id": ("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True)
class ErrorKind:
    """Rows that ended in one kind of error, and the first of them."""

    what: str
    count: int
    custom_id: str
    error: str


def kind_of(error: str) -> str:
    """The message with … in place of numbers and quoted names, cut to a line."""
    text = " ".join(error[: 8 * _KIND_CHARACTERS].split())
    text = _NUMBER.sub("…", _QUOTED.sub("'…'", text))
    return text if len(text) <= _KIND_CHARACTERS else text[: _KIND_CHARACTERS - 1] + "…"


class ErrorCounts:
    def __init__(self) -> None:
        self.kinds: dict[str, ErrorKind] = {}

    def add(self, custom_id: str, error: str) -> ErrorKind:
        what = kind_of(error)
        if what not in self.kinds and len(self.kinds) >= MOST_KINDS:
            what = OTHERS
        return self.merge(ErrorKind(what, 1, custom_id, error))

    def merge(self, more: ErrorKind) -> ErrorKind:
        """Add rows of a kind; its first example stays."""
        before = self.kinds.get(more.what)
        if before is not None:
            more = ErrorKind(more.what, before.count + more.count, before.custom_id, before.error)
        self.kinds[more.what] = more
        return more

    def most_first(self) -> tuple[ErrorKind, ...]:
        return tuple(sorted(self.kinds.values(), key=lambda kind: (-kind.count, kind.what)))


def read_errors(
    file: Path | None, shards: Iterable[Shard], clock: Callable[[], float] = time.monotonic
) -> tuple[int, tuple[ErrorKind, ...], bool]:
    """Rows of results as far as they can be read in `BUDGET_S`, the kinds of errors among them, and
    whether those are all rows.

    `file`: the finished file, where it counts. Of two results of a row the later one counts.
    """
    deadline = clock() + BUDGET_S
    failed: dict[bytes, tuple[str, str]] = {}
    rows = 0
    try:
        for line in _lines(file, shards):
            rows += 1
            _note(line, failed)
            if rows % 256 == 0 and clock() > deadline:
                return rows, _kinds(failed), False
    except (*READ_ERRORS, InputError):
        return rows, _kinds(failed), False
    return rows, _kinds(failed), True


def _lines(file: Path | None, shards: Iterable[Shard]) -> Iterator[object]:
    if file is not None:
        columns = ("custom_id", "error", "fingerprint")
        yield from finished_rows(file, output_format(file), columns)
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
