"""JSON, JSON lines and CSV: their readers and writers."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from llmpq.jobs import file_format
from llmpq.jobs.file_format import Compression, numbered_lines, opened
from llmpq.jobs.parquet import plain_row
from llmpq.rows.fields import KNOWN_FIELDS, STRUCTURED
from llmpq.rows.results import FINGERPRINT, RESULT_FIELDS
from quant.common.errors import InputError
from quant.common.json_text import check_depth, loads
from quant.common.url_files import AnyFile

_DECODE = json.JSONDecoder().raw_decode
_SPACE = re.compile(r"[ \t\r\n]*")
_WHOLE = re.compile(r'\s*(\[\s*[{\n]|\{\s*\n\s*")')
"""How an array of objects or of lines begins, and an object that spans lines."""

READ_CHARACTERS = 2**16
_LONGEST_WORD = 16
"""Longer than any word or escape of JSON: an error nearer to the end of what was read may be gone
with more of it.
"""


def is_whole_json(path: AnyFile, compression: Compression) -> bool:
    """Whether a file holds an array, or its first value spans lines; may raise `READ_ERRORS`."""
    with _text(path, compression) as text:
        if text.begins(_WHOLE):
            return True
        is_array = text.peek() == "["
        try:
            _, spans_lines = text.value()
            return spans_lines or (is_array and not text.peek())
        except InputError:  # lines of JSON, of which the first is none
            return False


def json_rows(path: AnyFile, compression: Compression) -> Iterator[Mapping[str, Any] | str]:
    """The objects of a file, one after another; a text stands for a value that is none.

    A value at a time is in memory. Raises `InputError` where the file is no JSON from some place
    on, or its first value is no object, and one of `READ_ERRORS`.
    """
    with _text(path, compression) as text:
        is_array = text.peek() == "["
        values = _elements(text) if is_array else _values(text)
        for number, value in enumerate(values, start=1):
            if isinstance(value, Mapping):
                yield value
            elif number > 1:
                yield "not a JSON object"
            else:
                raise text.wrong("its rows must be objects, each with a prompt", 0)


def _values(text: _Text) -> Iterator[object]:
    while text.peek():
        yield text.value()[0]


def _elements(text: _Text) -> Iterator[object]:
    mark = text.take()
    if text.peek() == "]":
        mark = text.take()
    while mark != "]":
        yield text.value()[0]
        mark = text.take()
        if mark not in (",", "]"):
            raise text.wrong("there is no ',' or ']' after a row of the array", -1)
    if text.peek():
        raise text.wrong("there is more after the end of the array", 0)


class _Text:
    def __init__(self, path: AnyFile, stream: TextIO) -> None:
        self._path, self._stream = path, stream
        self._part = stream.read(READ_CHARACTERS)
        self._at = 0
        self._line, self._column = 1, 0  # of the beginning of that part

    def begins(self, pattern: re.Pattern[str]) -> bool:
        return pattern.match(self._part) is not None

    def peek(self) -> str:
        """The next character that is no space, empty at the end."""
        while True:
            space = _SPACE.match(self._part, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._part) or not self._read_on():
                return self._part[self._at : self._at + 1]

    def take(self) -> str:
        found = self.peek()
        self._at += len(found)
        return found

    def value(self) -> tuple[object, bool]:
        """The next value, and whether it spans lines."""
        self.peek()
        while True:
            try:
                check_depth(self._part, self._at)
                value, end = _DECODE(self._part, self._at)
            except json.JSONDecodeError as error:
                after = error.pos - self._at
                is_cut = error.pos > len(self._part) - _LONGEST_WORD or "Untermin" in error.msg
                if not is_cut or not self._read_on():
                    raise self.wrong(error.msg, after) from error
            except ValueError as error:  # too deep a nesting, or a number of thousands of digits
                raise self.wrong(str(error), 0) from error
            else:
                spans_lines = "\n" in self._part[self._at : end]
                self._at = end
                return value, spans_lines

    def wrong(self, why: str, after: int) -> InputError:
        """The error of what is so many characters after the present place."""
        line, column = self._place(self._at + after)
        return InputError(
            f"cannot read input {self._path}: line {line}, column {column + 1}: {why}; mend the "
            "JSON, or give one JSON object per line, of which a bad one disturbs no other"
        )

    def _place(self, at: int) -> tuple[int, int]:
        """Line and column, from 0, of a character of the part."""
        lines = self._part.count("\n", 0, at)
        column = at - self._part.rfind("\n", 0, at) - 1
        return self._line + lines, column if lines else column + self._column

    def _read_on(self) -> bool:
        """Read as much again as is left; False at the end of the file."""
        left = self._part[self._at :]
        if len(left) > file_format.MAX_LINE_BYTES:
            raise self.wrong(f"a row has more than {file_format.MAX_LINE_BYTES} characters", 0)
        more = self._stream.read(max(READ_CHARACTERS, len(left)))
        self._line, self._column = self._place(self._at)
        self._part, self._at = left + more, 0
        return bool(more)


@contextmanager
def _text(path: AnyFile, compression: Compression) -> Iterator[_Text]:
    with opened(path, compression) as file:
        yield _Text(path, io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline=""))


RESULT_COLUMNS = (*RESULT_FIELDS, FINGERPRINT)
"""Columns that every table of results begins with."""

_ENCODE = json.JSONEncoder(ensure_ascii=False).encode

_PROMPT_COLUMNS = ("prompt", "messages", "body")
_TEXT = STRUCTURED | {"custom_id", "prompt"}
"""Columns that stay text here, as all own columns do; `plain_row` reads the JSON of some."""


def csv_rows(
    path: AnyFile, compression: Compression
) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Rows of prompts, each with the line it begins in, as a JSONL line would hold them.

    A text in the place of a row says what is wrong with it. An empty cell is a missing field.
    Raises `InputError` for a file whose header or quotes cannot be understood, as every row after
    that would be guessed, and what `numbered_lines` raises.
    """
    records = _records(path, compression)
    header = next(records, None)
    if header is None:
        return
    names = _checked(header[1], path)
    for line, cells, is_text in records:
        if len(cells) != len(names):
            yield line, f"{len(cells)} cells, but the header names {len(names)} columns"
        elif not is_text:
            yield line, "not UTF-8"
        else:
            given = ((name, cell) for name, cell in zip(names, cells, strict=True) if cell)
            yield line, plain_row({name: _value(name, cell) for name, cell in given})


def csv_lines(rows: Iterable[Mapping[str, Any]], own: Sequence[str] = ()) -> Iterator[bytes]:
    """Results as CSV with header, `own` columns last; JSON for what is no text, "" for None."""
    writer = csv.writer(_Echo())
    names = (*RESULT_COLUMNS, *own)
    yield writer.writerow(names).encode()
    for row in rows:
        yield writer.writerow([_cell(row.get(name)) for name in names]).encode()


def _cell(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else _ENCODE(value)


def read_csv_results(path: AnyFile, compression: Compression) -> Iterator[object]:
    """Results as `csv_lines` was given them; a row that is no result is a list of cells.

    An empty text is None in a row with an error, else empty. Own columns are texts, and missing
    where they are empty. Raises what `csv_rows` raises.
    """
    records = _records(path, compression)
    header = next(records, None)
    names = header[1] if header is not None else []
    if tuple(names[: len(RESULT_COLUMNS)]) != RESULT_COLUMNS:
        raise InputError(
            f"{path} has not the columns of a CSV file of results ({', '.join(RESULT_COLUMNS)})"
        )
    for _, cells, is_text in records:
        yield _result(names, cells) if is_text and len(cells) == len(names) else cells


def _result(names: list[str], cells: list[str]) -> object:
    known = len(RESULT_COLUMNS)
    row: dict[str, Any] = dict(zip(names[:known], cells[:known], strict=True))
    row |= {name: cell for name, cell in zip(names[known:], cells[known:], strict=True) if cell}
    try:
        row["token_ids"] = loads(row["token_ids"])
    except ValueError:
        return cells
    if not row["finish_reason"]:
        return row | {"text": None, "finish_reason": None}
    return row | {"error": None}


class _Echo:
    def write(self, text: str) -> str:
        return text


class _Lines(Iterator[str]):
    """Lines for the csv module; knows the line in which a row begins, and bounds its length."""

    def __init__(self, path: AnyFile, compression: Compression) -> None:
        self._path = path
        self._lines = numbered_lines(path, compression)
        self.begin()

    def begin(self) -> None:
        """Note that the next line is the first of a row."""
        self.first = self._bytes = 0
        self.is_text = True

    def __next__(self) -> str:
        """The next line; bytes in it that are not UTF-8 leave quotes and commas where they are."""
        number, line = next(self._lines)
        self.first = self.first or number
        self._bytes += len(line or b"")
        if line is None or self._bytes > file_format.MAX_LINE_BYTES:
            raise InputError(
                f"cannot read {self._path}: the row that begins in line {self.first} has more than "
                f"{file_format.MAX_LINE_BYTES} bytes; is a quote not closed?"
            )
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.is_text = False
            return line.decode("utf-8", "surrogateescape")


def _records(path: AnyFile, compression: Compression) -> Iterator[tuple[int, list[str], bool]]:
    if csv.field_size_limit() < file_format.MAX_LINE_BYTES:  # 128 KiB, of the whole process
        csv.field_size_limit(file_format.MAX_LINE_BYTES)
    lines = _Lines(path, compression)
    reader = csv.reader(lines, strict=True)
    while True:
        lines.begin()
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise InputError(
                f"cannot read {path}: the row that begins in line {lines.first} is no CSV "
                f"({error}); is a quote within it not doubled, or not closed?"
            ) from error
        if cells is None:
            return
        if cells:
            yield lines.first, cells, lines.is_text


def _checked(header: list[str], path: AnyFile) -> list[str]:
    names = [name.strip() for name in header]
    if "" in names:
        raise InputError(
            f"cannot read {path}: column {names.index('') + 1} has no name in the header; name it "
            "or leave it out (with pandas: index=False)"
        )
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise InputError(f"cannot read {path}: its header names column {twice[0]!r:.80} twice")
    if not set(_PROMPT_COLUMNS) & set(names):
        raise InputError(
            f"cannot read {path}: no column is called prompt or messages; the first line names the "
            "columns, with commas between them"
        )
    return names


def _value(name: str, cell: str) -> Any:
    """A cell's value: of its JSON where that is no text; own columns stay the texts they are."""
    is_one_stop = name == "stop" and not cell.lstrip().startswith("[")
    if name in _TEXT or name not in KNOWN_FIELDS or is_one_stop:
        return cell
    try:
        return loads(cell.lower() if cell.strip().lower() in ("true", "false") else cell)
    except ValueError:
        return cell
