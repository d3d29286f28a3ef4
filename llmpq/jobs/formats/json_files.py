"""Files of JSON whose rows are not one a line: an array, or objects that span lines."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from llmpq.jobs.formats import file_format
from llmpq.jobs.formats.file_format import Compression, opened
from quant.common.errors import InputError

_DECODE = json.JSONDecoder().raw_decode
_SPACE = re.compile(r"[ \t\r\n]*")
_WHOLE = re.compile(r'\s*(\[\s*[{\n]|\{\s*\n\s*")')
"""How an array of objects or of lines begins, and an object that spans lines."""

READ_CHARACTERS = 2**16
_LONGEST_WORD = 16
"""Longer than any word or escape of JSON: an error nearer to the end of what was read may be gone
with more of it.
"""


def is_whole_json(path: Path, compression: Compression) -> bool:
    """Whether a file holds an array, or begins with a value that spans lines.

    Raises one of `READ_ERRORS`.
    """
    with _text(path, compression) as text:
        if text.begins(_WHOLE):
            return True
        is_array = text.peek() == "["
        try:
            _, spans_lines = text.value()
            return spans_lines or (is_array and not text.peek())
        except InputError:  # lines of JSON, of which the first is none
            return False


def json_rows(path: Path, compression: Compression) -> Iterator[Mapping[str, Any] | str]:
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
    """The text of a file, of which the part around the present place is in memory."""

    def __init__(self, path: Path, stream: TextIO) -> None:
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
                value, end = _DECODE(self._part, self._at)
            except json.JSONDecodeError as error:
                after = error.pos - self._at
                is_cut = error.pos > len(self._part) - _LONGEST_WORD or "Untermin" in error.msg
                if not is_cut or not self._read_on():
                    raise self.wrong(error.msg, after) from error
            except (ValueError, RecursionError) as error:  # a number of thousands of digits
                why = "a row nests too deeply" if isinstance(error, RecursionError) else str(error)
                raise self.wrong(why, 0) from error
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
def _text(path: Path, compression: Compression) -> Iterator[_Text]:
    with opened(path, compression) as file:
        yield _Text(path, io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline=""))
