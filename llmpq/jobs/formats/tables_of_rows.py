"""Rows of a table of pandas, polars or Arrow, or of what can be read as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

from llmpq.jobs.formats.parquet import plain_row, require_pyarrow
from llmpq.rows.results import plain_value
from quant.common.errors import InputError


@runtime_checkable
class Table(Protocol):
    """A table: what gives its columns by Arrow's interface, as those of pandas, polars, Arrow and
    DuckDB do.
    """

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """The columns, batch by batch."""


def is_table(items: object) -> TypeGuard[Table]:
    """Whether `items` is a table rather than an iterable of rows."""
    is_batch = hasattr(items, "__arrow_c_array__") and hasattr(items, "schema")
    known = isinstance(items, Table) or hasattr(items, "collect_schema") or is_batch
    return known and not is_column(items)


def is_column(items: object) -> bool:
    """Whether `items` is one column of a table: a series of pandas or polars, an array of Arrow."""
    is_array = hasattr(items, "__arrow_c_array__") or hasattr(items, "__arrow_c_stream__")
    return (is_array and hasattr(items, "type")) or hasattr(items, "dtype")


def prompts_of_column(column: Any) -> Iterator[Any]:
    """The values of a column as Python has them."""
    listed = getattr(column, "to_pylist", getattr(column, "to_list", None))
    values = column if listed is None else listed()
    return (value.tolist() if hasattr(value, "tolist") else value for value in values)


def rows_of_table(table: Any) -> Iterator[Mapping[str, Any]]:
    """The rows of a table as JSONL lines would hold them; a missing value is a missing field.

    Raises `InputError` for an empty one, for columns that have one name, and where pyarrow is
    missing that the table needs.
    """
    if hasattr(table, "collect_schema") and hasattr(table, "collect"):  # a lazy one of polars
        table = table.collect()
    if hasattr(table, "iloc"):
        rows = _rows_of_pandas(table)
    elif hasattr(table, "iter_rows"):
        rows = table.iter_rows(named=True)
    else:
        rows = _rows_of_arrow(table)
    return map(plain_row, rows)


def _rows_of_pandas(frame: Any) -> Iterable[dict[str, Any]]:
    if not frame.columns.is_unique:
        double = frame.columns[frame.columns.duplicated()][0]
        raise InputError(f"rows: the table has two columns {double!r}; rename one of them")
    names = [str(name) for name in frame.columns]
    missing = frame.isna()
    for values, gone in zip(
        frame.itertuples(index=False, name=None),
        missing.itertuples(index=False, name=None),
        strict=True,
    ):
        yield {
            name: None if is_gone else plain_value(value)
            for name, value, is_gone in zip(names, values, gone, strict=True)
        }


def _rows_of_arrow(table: Any) -> Iterator[dict[str, Any]]:
    require_pyarrow("Tables")
    import pyarrow as pa

    if hasattr(table, "__arrow_c_array__"):  # one batch
        batches = [table]
    elif hasattr(table, "to_batches"):
        batches = table.to_batches()
    else:
        batches = pa.RecordBatchReader.from_stream(table)
    for batch in batches:
        yield from batch.to_pylist()
