"""Formats of files of rows: by their names, as streams of bytes, and whether names are true."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from quant.common.errors import InputError
from quant.common.json_text import loads
from quant.common.url_files import AnyFile

RowFormat = Literal["jsonl", "csv", "parquet"]
Compression = Literal["", ".gz", ".zst"]

COMPRESSIONS: tuple[Compression, ...] = (".gz", ".zst")
_ROW_FORMATS: dict[str, RowFormat] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}
PARQUET = ".parquet"

SUFFIXES = (
    *(f"{suffix}{compression}" for suffix in _ROW_FORMATS for compression in ("", *COMPRESSIONS)),
    PARQUET,
)
"""Endings of the files that count in a folder; a file that is named itself may have any."""

WRITTEN = (
    f"{', '.join(_ROW_FORMATS)} (each also with {' or '.join(COMPRESSIONS)}) and {PARQUET}, "
    "and folders, whose name ends in /"
)

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


@dataclass(frozen=True)
class FileFormat:
    rows: RowFormat
    compression: Compression = ""

    @property
    def name(self) -> str:
        if self.compression:
            return "gzip" if self.compression == ".gz" else "Zstandard"
        return {"jsonl": "JSON lines", "csv": "CSV", "parquet": "Parquet"}[self.rows]


JSON_LINES = FileFormat("jsonl")


def input_format(path: AnyFile) -> FileFormat:
    """JSON lines where the name tells no format; `InputError` for Parquet compressed as a whole."""
    stem, compression = _without_compression(path.name.lower())
    if stem.endswith(PARQUET):
        if compression:
            raise InputError(
                f"cannot read input {path}: Parquet is compressed within and read in parts; "
                f"decompress the file and leave out {compression}"
            )
        return FileFormat("parquet")
    return FileFormat(_row_format(stem) or "jsonl", compression)


def output_format(path: Path) -> FileFormat:
    """JSON lines where the name has no ending; `InputError` for one that llmpq does not write."""
    name = path.name.lower()
    stem, compression = _without_compression(name)
    rows = _row_format(stem)
    if rows is not None:
        return FileFormat(rows, compression)
    if name.endswith(PARQUET):
        return FileFormat("parquet")
    if not path.suffix:
        return JSON_LINES
    raise InputError(
        f"output {path} ends in {path.suffix!r:.80}, which llmpq does not write; give it one of "
        f"the names of what it writes: {WRITTEN}"
    )


def _row_format(stem: str) -> RowFormat | None:
    return next((rows for suffix, rows in _ROW_FORMATS.items() if stem.endswith(suffix)), None)


def _without_compression(name: str) -> tuple[str, Compression]:
    found: Compression = next((each for each in COMPRESSIONS if name.endswith(each)), "")
    return name.removesuffix(found), found


def require_pyarrow(what: str = "Parquet files") -> None:
    """Raise `InputError` that `what` needs pyarrow, where it is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"{what} need pyarrow, which is not installed: pip install 'llmpq[parquet]'"
        ) from error


def reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def opened(path: AnyFile, compression: Compression) -> Iterator[BinaryIO]:
    if compression == ".gz":
        with path.open("rb") as packed, gzip.open(packed, "rb") as unpacked:
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


def numbered_lines(path: AnyFile, compression: Compression) -> Iterator[tuple[int, bytes | None]]:
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


def contradiction(path: AnyFile, named: FileFormat) -> str | None:
    """A sentence on a file that holds something else than its name says; raises `READ_ERRORS`."""
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


def _content(path: AnyFile, named: FileFormat) -> str | None:
    """Content of a file of lines, once it is decompressed, if that is something else than these."""
    with opened(path, named.compression) as file:
        line = file.readline(_SNIFFED_BYTES)
    found = _magic(line)
    if found is not None:
        return found
    text = line.removeprefix(_BYTE_ORDER_MARK).decode("utf-8", "replace").strip()
    if named.rows == "csv":
        return "JSON lines" if isinstance(json_value(text), dict) else None
    columns = {cell.strip(' "') for cell in text.split(",")}
    is_header = not text.startswith(("{", "[")) and columns & _COLUMNS
    return "CSV" if is_header else None


def json_value(text: str | bytes) -> Any:
    """The value of a JSON text; None where it is none, or nests too deeply."""
    try:
        return loads(text)
    except ValueError:
        return None


def _magic(data: bytes) -> str | None:
    if data[1:4] == _SKIPPABLE_FRAME and data[0] >> 4 == 5:
        return "Zstandard"
    return next((name for magic, name in _MAGIC if data.startswith(magic)), None)
