"""The prompts of a batch from Python: strings, token lists, dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llmpq.jobs.formats.tables_of_rows import (
    Table,
    is_column,
    is_table,
    prompts_of_column,
    rows_of_table,
)
from llmpq.jobs.records.row_database import RowDatabase
from llmpq.rows.row import BadRow, Occurrences, Row, RowInput, row_from_mapping
from quant.common.errors import InputError

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
        return _from_items(rows_of_table(items), None)
    if is_column(items):
        return _from_items(prompts_of_column(items), None)
    assert isinstance(items, Iterable)
    if isinstance(items, Sequence):
        for _ in _from_items(items, None):
            pass
    return _from_items(items, None)


def rows_named_by_content(items: Iterable[Mapping[str, Any]]) -> Iterator[Row | BadRow]:
    """Rows from dictionaries that come in no settled order, as `rows_of` makes them.

    Those without an id get one that is made from their content.
    """
    return _from_items(items, Occurrences())


def _from_items(
    items: Iterable[RowInput], occurrences: Occurrences | None
) -> Iterator[Row | BadRow]:
    database = RowDatabase()
    number = -1
    for number, item in enumerate(items):
        place = f"row-{number}"
        row = row_from_mapping(item if isinstance(item, Mapping) else {"prompt": item}, place)
        if not row.custom_id and isinstance(row, Row):
            made = place if occurrences is None else occurrences.custom_id(row.named_by)
            row = row.named(made)
        earlier = database.want(row.custom_id, "", number)
        if earlier is not None:
            raise InputError(
                f"custom_id {row.custom_id!r:.80} of row {number} stands in row {earlier} already; "
                "results could not be told apart"
            )
        yield row
    if number < 0:
        raise InputError("rows: no prompts; give at least one")
