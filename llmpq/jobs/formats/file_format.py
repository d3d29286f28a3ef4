"""Formats of files of rows, by their names in upper or lower case."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quant.common.errors import InputError

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


@dataclass(frozen=True)
class FileFormat:
    """The format of the rows of a file, and its compression."""

    rows: RowFormat
    compression: Compression = ""

    @property
    def name(self) -> str:
        """The format in a message."""
        if self.compression:
            return "gzip" if self.compression == ".gz" else "Zstandard"
        return {"jsonl": "JSON lines", "csv": "CSV", "parquet": "Parquet"}[self.rows]


JSON_LINES = FileFormat("jsonl")


def input_format(path: Path) -> FileFormat:
    """Format of a file of prompts; JSON lines where its name tells no format.

    Raises `InputError` for Parquet that is compressed as a whole.
    """
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
    """Format of a file of results; JSON lines where its name has no ending.

    Raises `InputError` for an ending that llmpq does not write.
    """
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
