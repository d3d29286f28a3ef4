"""Files of rows as streams of bytes, compressed or not, and whether their names are true.

Zstandard is read and written by pyarrow, a window of at most 128 MiB at a time.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from llmpq.jobs.formats.file_format import Compression, FileFormat
from llmpq.jobs.formats.parquet import require_pyarrow

MAX_LINE_BYTES = 2**26
"""Longer than any prompt, and short enough that a file without line ends cannot fill the memory."""

READ_ERRORS = (OSError, EOFError, zlib.error)
"""Errors of files that cannot be read, or whose compressed content is damaged or cut off."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP_LEVEL = 6  # of the gzip command; Python's own, 9, takes several times as long
_SNIFFED_BYTES = 2**16
_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "Zstandard"),
    (b"PAR1", "Parquet"),
    (b"PK\x03\x04", "a zip archive, as an Excel workbook is"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_SKIPPABLE_FRAME = b"\x2a\x4d\x18"  # after one byte of 0x50 to 0x5f, RFC 8878 section 3.1.2
_COLUMNS = {"prompt", "messages", "custom_id"}


def reason(error: BaseException) -> str:
    """The reason, in words, of one of `READ_ERRORS`."""
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def opened(path: Path, compression: Compression) -> Iterator[BinaryIO]:
    """The content of a file, decompressed as it is read."""
    if compression == ".gz":
        with gzip.open(path, "rb") as unpacked:
            yield cast(BinaryIO, unpacked)
    elif compression == ".zst":
        require_pyarrow("Files that end in .zst")
        import pyarrow as pa

        with (
            path.open("rb") as packed,
            pa.CompressedInputStream(pa.PythonFile(packed, "r"), "zstd") as stream,
        ):
            yield io.BufferedReader(stream)
    else:
        with path.open("rb") as file:
            yield file


@contextmanager
def compressed(sink: io.RawIOBase, compression: Compression) -> Iterator[Any]:
    """A stream that writes to `sink` compressed, the same content always as the same bytes."""
    if compression == ".gz":
        with gzip.GzipFile("", "wb", _GZIP_LEVEL, cast(BinaryIO, sink), mtime=0) as packed:
            yield packed
    elif compression == ".zst":
        import pyarrow as pa

        with pa.CompressedOutputStream(pa.PythonFile(sink, "w"), "zstd") as stream:
            yield stream
    else:
        yield sink


def numbered_lines(path: Path, compression: Compression) -> Iterator[tuple[int, bytes | None]]:
    """Lines and their numbers; None for one that is too long. Raises one of `READ_ERRORS`."""
    with opened(path, compression) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if len(line) <= MAX_LINE_BYTES or line.endswith(b"\n"):
                yield number, line
                continue
            yield number, None
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)


def contradiction(path: Path, named: FileFormat) -> str | None:
    """A sentence on a file that holds something else than its name says, else None.

    Raises one of `READ_ERRORS`.
    """
    with path.open("rb") as file:
        start = file.read(8)
    found = _magic(start)
    if named.compression or named.rows == "parquet":
        if found != named.name:
            return _told(named, found or (f"no {named.name}" if start else "nothing"))
        if named.rows == "parquet":
            return None
    elif found is not None:
        return _told(named, found)
    within = _content(path, named)
    return within and _told(FileFormat(named.rows), within)


def _told(named: FileFormat, found: str) -> str:
    return f"its name stands for {named.name}, but it holds {found}; name it by what it holds"


def _content(path: Path, named: FileFormat) -> str | None:
    """Content of a file of lines, once it is decompressed, if that is something else than these."""
    with opened(path, named.compression) as file:
        line = file.readline(_SNIFFED_BYTES)
    found = _magic(line)
    if found is not None:
        return found
    text = line.removeprefix(_BYTE_ORDER_MARK).decode("utf-8", "replace").strip()
    if named.rows == "csv":
        return "JSON lines" if _is_object(text) else None
    columns = {cell.strip(' "') for cell in text.split(",")}
    is_header = not text.startswith(("{", "[")) and columns & _COLUMNS
    return "CSV" if is_header else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _magic(data: bytes) -> str | None:
    if data[1:4] == _SKIPPABLE_FRAME and data[0] >> 4 == 5:
        return "Zstandard"
    return next((name for magic, name in _MAGIC if data.startswith(magic)), None)
