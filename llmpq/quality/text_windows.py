"""Text to measure or calibrate on: documents from files, cut into windows of token ids.

Documents are tokenized one by one, as the model's tokenizer does it (with its beginning-of-sequence
token if it has one), laid end to end, and cut into windows that do not overlap.
"""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llmpq.quality.options import check_lengths
from quant.common.errors import InputError
from quant.common.json_text import loads

if TYPE_CHECKING:
    from llmpq.tokenizing.tokenizer_process import TokenizerProcess

Document = str | Sequence[int]
TokenIds = npt.NDArray[np.int64]

STDIN = "-"
_JSON_LINES = (".jsonl", ".ndjson")
_TEXTS = (".txt", ".md", *_JSON_LINES)
"""Endings of the files that count in a folder; a file that is named itself may have any."""

_FIELDS = ("prompt", "text")
_PADDING = 0  # any id does: no token sees those to its right, and none of these is scored


@dataclass(frozen=True)
class Windows:
    """Non-overlapping windows of one length.

    `token_ids` `[windows, length]`; `counts` `[windows]`: tokens of each that are text; only the
    last window may be shorter, and is padded on its right.
    """

    token_ids: TokenIds
    counts: npt.NDArray[np.int64]

    @property
    def scored(self) -> int:
        """Tokens with at least one token of their window before them."""
        return int((self.counts - 1).sum())


def read_documents(paths: Iterable[str | Path]) -> tuple[Document, ...]:
    """The documents in `paths` (files, folders, globs): JSON lines with `prompt` or `text` (a
    string or token ids) where the name ends in .jsonl, else each file as a whole; `-` is the
    standard input.

    Raises `InputError` naming file and line.
    """
    documents: list[Document] = []
    found = dict.fromkeys(path for name in paths for path in _files_of(str(name)))
    for path in found:
        text = _read(path)
        if Path(path).suffix in _JSON_LINES:
            documents += [
                _from_line(line, f"{path}:{number}")
                for number, line in enumerate(text.split("\n"), start=1)
                if line.strip()
            ]
        else:
            documents.append(text)
    return tuple(documents)


def as_documents(text: Document | Iterable[Document]) -> tuple[Document, ...]:
    """Documents from what Python users may pass: a text, its token ids, or several of either."""
    if isinstance(text, str):
        return (text,)
    items = tuple(text)
    if items and all(isinstance(item, int | np.integer) for item in items):
        return (items,)  # type: ignore[return-value]
    for item in items:
        if not isinstance(item, str | Sequence):
            raise InputError(
                f"a document is {type(item).__name__}; give text or a list of token ids"
            )
    return items  # type: ignore[return-value]


def token_windows(
    documents: Iterable[Document],
    tokenizer: TokenizerProcess | None,
    sequence_length: int,
    max_tokens: int | None = None,
) -> Windows:
    """The documents' tokens, at most `max_tokens`, in windows of `sequence_length`.

    `tokenizer` may be None when every document is token ids. A text shorter than a window makes one
    window of its own length; a single token that is left over is dropped. Raises `InputError`
    where fewer than 2 tokens are there, for numbers below 2, and for what cannot be tokenized.
    """
    check_lengths(sequence_length, max_tokens)
    stream: list[int] = []
    for number, document in enumerate(documents, start=1):
        stream += _token_ids(document, tokenizer, number)
        if max_tokens is not None and len(stream) >= max_tokens:
            stream = stream[:max_tokens]
            break
    if len(stream) < 2:
        raise InputError(
            f"the text has {len(stream)} token{'s' * (len(stream) != 1)}; at least 2 are needed, "
            "and some thousands for a figure that means something"
        )
    return _cut(stream, min(sequence_length, len(stream)))


def _cut(stream: Sequence[int], length: int) -> Windows:
    used = len(stream) - (len(stream) % length == 1)  # nothing precedes a last single token
    windows = -(-used // length)
    token_ids = np.full(windows * length, _PADDING, dtype=np.int64)
    token_ids[:used] = stream[:used]
    counts = np.minimum(used - length * np.arange(windows), length)
    return Windows(token_ids.reshape(windows, length), counts)


def _token_ids(
    document: Document, tokenizer: TokenizerProcess | None, number: int
) -> Sequence[int]:
    if not isinstance(document, str):
        if not all(isinstance(t, int | np.integer) and 0 <= t < 2**31 for t in document):
            raise InputError("token ids must be whole numbers of at least 0")
        return [int(token) for token in document]
    if tokenizer is None:
        raise InputError(
            "the model folder has no tokenizer; give JSON lines whose prompt is a list of token ids"
        )
    answer = tokenizer.ask({"text": document})
    if answer.ids is None:
        raise InputError(
            f"document {number} ({document!r:.40}…) cannot be tokenized: {answer.of}: "
            f"{answer.error}; fix it or leave it out"
        )
    return answer.ids


def _files_of(name: str) -> list[str]:
    path = Path(name)
    try:
        if path.is_dir():
            found = sorted(each for each in path.iterdir() if each.suffix in _TEXTS)
            kind = f"file that ends in {', '.join(_TEXTS)}"
        elif name == STDIN or not glob.has_magic(name) or path.exists():
            return [name]
        else:
            found, kind = sorted(map(Path, glob.glob(name, recursive=True))), "file of that name"
    except (OSError, ValueError):  # reading it will say what is wrong
        return [name]
    files = [str(each) for each in found if each.is_file()]
    if not files:
        raise InputError(f"cannot read text {name}: no {kind} there")
    return files


def _read(path: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"text {path} is not UTF-8 (byte {error.start})") from error
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot read text {path}: {reason}") from error


def _from_line(line: str, place: str) -> Document:
    try:
        content = loads(line)
    except ValueError as error:
        raise InputError(f"{place}: not JSON: {error}") from error
    fields = content if isinstance(content, Mapping) else {}
    given = [name for name in _FIELDS if name in fields]
    if len(given) != 1:
        raise InputError(f"{place}: a line needs exactly one of {' and '.join(_FIELDS)}")
    value = fields[given[0]]
    is_ids = isinstance(value, list) and all(type(token) is int for token in value)
    if not isinstance(value, str) and not is_ids:
        raise InputError(f"{place}: {given[0]} must be text or a list of token ids")
    document: Document = value
    return document
