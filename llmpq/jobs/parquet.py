"""Parquet files of prompts and of results, a bounded number of rows at a time; needs pyarrow.

A table has one type a column, and rows may differ in their own columns. Columns of truth values,
whole numbers, numbers, texts and lists of one of these have that type. Any other, as of objects or
of numbers beside texts, holds each value as JSON text.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any, Literal

from llmpq.jobs.file_format import require_pyarrow
from llmpq.rows.fields import STRUCTURED, is_field
from llmpq.rows.results import FINGERPRINT, RESULT_FIELDS
from quant.common.errors import InputError
from quant.common.json_text import loads
from quant.common.url_files import AnyFile, UrlFile

ROWS_AT_ONCE = 2048
ROWS_PER_GROUP = 16384
DECODED_BYTES = 2**29
"""Size of a column of the rows that are read at once, as far as it is known."""

_JSON_TEXT = {b"llmpq": b"json"}
"""Metadata of a column whose texts are JSON, as an own column of objects is written."""

_NOT_PYTHON = (ValueError, OverflowError, LookupError)
"""Errors for values that Python has no form of: text that is not UTF-8, a time too far off, an
unknown time zone.
"""

Scalar = Literal["empty", "bool", "int", "long", "float", "text", "json"]

_KNOWN = frozenset((*RESULT_FIELDS, FINGERPRINT))
_EXACT = 2**53  # whole numbers up to here are exact as a float
_WIDEST = 2**63
MOST_COLUMNS = 1000
"""Own columns of a table: a thousand names are no table any more, and every row has a cell of each.
"""

_LEVELS = 3  # of lists in lists; deeper ones are JSON text


def parquet_rows(path: AnyFile) -> Iterator[Mapping[str, Any]]:
    """Rows of prompts as a JSONL line would hold them; a missing value is a missing field.

    `messages` may be a list of structs or JSON text, `sampling`, `logit_bias` and what else is an
    object a struct or JSON text. Raises `InputError` for a file that is no Parquet.
    """
    return map(plain_row, read_results(path, None))


def plain_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    given = {name: value for name, value in row.items() if value is not None}
    for name in STRUCTURED & given.keys():
        value = _plain(given[name])
        given |= {name: value} if is_field(name, value, given) else {}
    return given


def write_results(sink: io.RawIOBase, rows: Iterable[Mapping[str, Any]], own: ColumnKinds) -> None:
    """Write results, with the `own` columns of their rows, as one Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {
        "custom_id": pa.string(),
        "text": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "finish_reason": pa.string(),
        "error": pa.string(),
        FINGERPRINT: pa.string(),
    }
    fields = [pa.field(name, type_) for name, type_ in types.items()]
    schema = pa.schema([*fields, *(_field(*each) for each in own.kinds.items())])
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        rest = map(own.cells, rows)
        while group := list(islice(rest, ROWS_PER_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema))


def with_json_values(rows: Iterable[Mapping[str, Any]], schema: Any) -> Iterator[Mapping[str, Any]]:
    """The `rows` of a table of results with the values of columns that hold JSON text."""
    marked = [each.name for each in schema if _JSON_TEXT.items() <= (each.metadata or {}).items()]
    for row in rows:
        yield {**row, **{name: _plain(row[name]) for name in marked}} if marked else row


def _field(name: str, kind: ColumnKind) -> Any:
    """The column of an own column; one of JSON text says so, for when it is read again."""
    import pyarrow as pa

    types = {"bool": pa.bool_(), "int": pa.int64(), "long": pa.int64(), "float": pa.float64()}
    found = types.get(kind.scalar, pa.string())
    for _ in range(kind.levels):
        found = pa.list_(found)
    return pa.field(name, found, metadata=_JSON_TEXT if kind == JSON else None)


def read_results(path: AnyFile, columns: Sequence[str] | None) -> Iterator[Mapping[str, Any]]:
    require_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        source = path.open("rb") if isinstance(path, UrlFile) else path
        with pq.ParquetFile(source) as file:
            missing = set(columns or ()) - set(file.schema_arrow.names)
            if missing:
                raise InputError(f"{path} has no column {sorted(missing)[0]!r}")
            for batch in file.iter_batches(_rows_at_once(file.metadata), columns=columns):
                yield from with_json_values(batch.to_pylist(), batch.schema)
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
            return loads(value)
        except ValueError:
            return value
    if isinstance(value, list):
        return [_plain(item) if isinstance(item, Mapping) else item for item in value]
    if isinstance(value, Mapping):
        return {name: item for name, item in value.items() if item is not None}
    return value


@dataclass(frozen=True)
class ColumnKind:
    scalar: Scalar
    levels: int = 0


EMPTY, JSON = ColumnKind("empty"), ColumnKind("json")
_WIDER: Mapping[frozenset[Scalar], Scalar] = {
    frozenset(("int", "long")): "long",
    frozenset(("int", "float")): "float",
}


class ColumnKinds:
    """The own columns of many rows, in the order in which they are met, and their kinds."""

    def __init__(self) -> None:
        self.kinds: dict[str, ColumnKind] = {}

    def note(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Note the columns of `rows`, which are read once and not kept."""
        for row in rows:
            for name, value in row.items():
                if name not in _KNOWN:
                    kind = self.kinds.get(name, EMPTY)
                    self.kinds[name] = kind if kind == JSON else joined(kind, kind_of(value))

    def cells(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row for a table of these columns: JSON text where a column holds that."""
        texts = {
            name: json.dumps(row[name], ensure_ascii=False)
            for name, kind in self.kinds.items()
            if kind == JSON and row.get(name) is not None
        }
        return {**row, **texts}


def kind_of(value: Any) -> ColumnKind:
    """The kind of one JSON value; of a list, the one that all its values have."""
    if value is None:
        return EMPTY
    if isinstance(value, bool):
        return ColumnKind("bool")
    if isinstance(value, int):
        size = abs(value)
        return ColumnKind("int" if size <= _EXACT else "long" if size < _WIDEST else "json")
    if isinstance(value, float):
        return ColumnKind("float")
    if isinstance(value, str):
        return ColumnKind("text")
    inner = reduce(joined, map(kind_of, value), EMPTY) if isinstance(value, list) else JSON
    deepest = inner == JSON or inner.levels == _LEVELS
    return JSON if deepest else ColumnKind(inner.scalar, inner.levels + 1)


def joined(one: ColumnKind, other: ColumnKind) -> ColumnKind:
    """The kind that values of both kinds have."""
    if one == other:
        return one
    for empty, full in ((one, other), (other, one)):
        if empty.scalar == "empty" and empty.levels <= full.levels:
            return full
    wider = _WIDER.get(frozenset((one.scalar, other.scalar)))
    return JSON if wider is None or one.levels != other.levels else ColumnKind(wider, one.levels)
