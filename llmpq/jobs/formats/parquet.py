"""Parquet files of prompts and of results, a bounded number of rows at a time; needs pyarrow."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from quant.common.errors import InputError

ROWS_AT_ONCE = 2048
ROWS_PER_GROUP = 16384
DECODED_BYTES = 2**29
"""Size of a column of the rows that are read at once, as far as it is known."""

_NOT_PYTHON = (ValueError, OverflowError, LookupError)
"""Errors for values that Python has no form of: text that is not UTF-8, a time too far off, an
unknown time zone.
"""


def require_pyarrow(what: str = "Parquet files") -> None:
    """Raise `InputError` that `what` needs pyarrow, where it is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"{what} need pyarrow, which is not installed: pip install 'llmpq[parquet]'"
        ) from error


def parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Rows of prompts as a JSONL line would hold them; a missing value is a missing field.

    `messages` may be a list of structs or JSON text, `sampling` and `logit_bias` a struct or JSON
    text. Raises `InputError` for a file that is no Parquet.
    """
    return map(plain_row, _read(path, None))


def plain_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of columns as a JSONL line would hold it."""
    given = {name: value for name, value in row.items() if value is not None}
    for name in ("messages", "sampling", "logit_bias"):
        if name in given:
            given[name] = _plain(given[name])
    return given


def read_results(path: Path, columns: Sequence[str] | None) -> Iterator[Mapping[str, Any]]:
    """Rows of a file of results, `columns` of them; `InputError` for a file that is no Parquet."""
    return _read(path, columns)


def write_results(sink: io.RawIOBase, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write results as one Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = result_schema().append(pa.field("fingerprint", pa.string()))
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        rest = iter(rows)
        while group := [dict(row) for row in islice(rest, ROWS_PER_GROUP)]:
            writer.write_table(pa.Table.from_pylist(group, schema))


def result_schema() -> Any:
    """Columns of a table of results."""
    import pyarrow as pa

    return pa.schema(
        {
            "custom_id": pa.string(),
            "text": pa.string(),
            "token_ids": pa.list_(pa.int32()),
            "finish_reason": pa.string(),
            "error": pa.string(),
        }
    )


def _read(path: Path, columns: Sequence[str] | None) -> Iterator[Mapping[str, Any]]:
    require_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            missing = set(columns or ()) - set(file.schema_arrow.names)
            if missing:
                raise InputError(f"{path} has no column {sorted(missing)[0]!r}")
            names = None if columns is None else list(columns)
            for batch in file.iter_batches(_rows_at_once(file.metadata), columns=names):
                yield from batch.to_pylist()
    except (pa.ArrowException, *_NOT_PYTHON) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}") from error


def _rows_at_once(metadata: Any) -> int:
    """Number of rows that fit `DECODED_BYTES` even if each text were as long as its group of rows.

    A text in a dictionary stands there once for all rows. Only sizes of whole groups are looked at:
    pyarrow ends the process where it is asked for those of a column whose statistics are damaged.
    """
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    largest = max((group.total_byte_size for group in groups), default=0)
    return int(min(ROWS_AT_ONCE, max(1, DECODED_BYTES // max(1, largest))))


def _plain(value: Any) -> Any:
    """The value of JSON text; structs without the fields that are not set."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    if isinstance(value, list):
        return [_plain(item) if isinstance(item, Mapping) else item for item in value]
    if isinstance(value, Mapping):
        return {name: item for name, item in value.items() if item is not None}
    return value
