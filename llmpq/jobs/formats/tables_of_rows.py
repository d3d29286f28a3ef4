"""Rows of a table of pandas, polars or Arrow, or of what can be read as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

from llmpq.jobs.formats.parquet import plain_row, require_pyarrow
from quant.common.errors import InputError

_WHOLE_NUMBERS = ("max_new_tokens", "max_tokens", "max_completion_tokens", "seed", "top_k")
"""Fields that a column of pandas holds as floats where some rows have none."""


@runtime_checkable
class Table(Protocol):
    """A table: what gives its columns by Arrow's interface, as those of pandas, polars, Arrow and
    DuckDB do.
    """

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """The columns, batch by batch."""


def is_table(items: object) -> TypeGuard[Table]:
    """Whether `items` is a table rather than an iterable of rows."""
    return isinstance(items, Table) or hasattr(items, "collect_schema")


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
            name: None if is_gone else _plain_value(name, value)
            for name, value, is_gone in zip(names, values, gone, strict=True)
        }


def _plain_value(name: str, value: Any) -> Any:
    """A value as Python has it, where it is numpy's."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if name in _WHOLE_NUMBERS and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _rows_of_arrow(table: Any) -> Iterator[dict[str, Any]]:
    require_pyarrow("Tables")
    import pyarrow as pa

    if not hasattr(table, "to_batches"):
        table = pa.RecordBatchReader.from_stream(table)
    batches = table.to_batches() if hasattr(table, "to_batches") else table
    for batch in batches:
        yield from batch.to_pylist()
