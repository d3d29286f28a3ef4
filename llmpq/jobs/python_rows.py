"""Prompts from Python: strings, token lists, dictionaries, and tables of pandas, polars and Arrow,
and what can be read as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

from llmpq.jobs.file_format import require_pyarrow
from llmpq.jobs.parquet import plain_row
from llmpq.jobs.row_database import RowDatabase, WantedRow
from llmpq.rows.results import plain_value
from llmpq.rows.row import BadRow, Row, RowInput, row_from_mapping
from quant.common.errors import InputError


@runtime_checkable
class Table(Protocol):
    """What gives columns by Arrow's interface, as pandas, polars, Arrow and DuckDB do."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """The columns, batch by batch."""


RowsInput = Iterable[RowInput] | Table
"""Strings, lists of token ids and dictionaries, or a table whose columns are named as the fields of
a JSONL line."""


def rows_of(items: RowsInput) -> Iterator[Row | BadRow]:
    """Rows from Python as they are asked for; those without an id become `row-0` and so on.

    An item is a string, a list of token ids, or a dictionary as in a JSONL line; tables, and single
    columns, are those of pandas, polars and Arrow. Raises `InputError` for a single string, whose
    characters nobody means as prompts, and where an id comes twice or there are no rows: at once if
    `items` is a list, else when it is met.
    """
    if isinstance(items, str | bytes):
        raise InputError("rows is one string; pass a list of prompts")
    if is_table(items):
        return _from_items(rows_of_table(items))
    if is_column(items):
        return _from_items(prompts_of_column(items))
    assert isinstance(items, Iterable)
    if isinstance(items, Sequence):
        for _ in _from_items(items):
            pass
    return _from_items(items)


def _from_items(items: Iterable[RowInput]) -> Iterator[Row | BadRow]:
    database = RowDatabase()
    number = -1
    for number, item in enumerate(items):
        place = f"row-{number}"
        row = row_from_mapping(item if isinstance(item, Mapping) else {"prompt": item}, place)
        if not row.custom_id and isinstance(row, Row):
            row = row.named(place)
        twice = database.want_all([WantedRow(row.custom_id, "", number, 0)])
        if twice is not None:
            raise InputError(
                f"custom_id {row.custom_id!r:.80} of row {number} stands in row {twice[1]} "
                "already; results could not be told apart"
            )
        yield row
    if number < 0:
        raise InputError("rows: no prompts; give at least one")


def is_table(items: object) -> TypeGuard[Table]:
    is_batch = hasattr(items, "__arrow_c_array__") and hasattr(items, "schema")
    known = isinstance(items, Table) or hasattr(items, "collect_schema") or is_batch
    return known and not is_column(items)


def is_column(items: object) -> bool:
    """Whether `items` is one column of a table: a series of pandas or polars, an array of Arrow."""
    is_array = hasattr(items, "__arrow_c_array__") or hasattr(items, "__arrow_c_stream__")
    return (is_array and hasattr(items, "type")) or hasattr(items, "dtype")


def prompts_of_column(column: Any) -> Iterator[Any]:
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
