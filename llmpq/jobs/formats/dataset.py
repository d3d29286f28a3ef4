"""Ray Datasets of prompts and of results; needs pyarrow and pandas (the extra `data`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from llmpq.jobs.formats.column_kinds import ColumnKinds, Kind
from llmpq.jobs.formats.parquet import (
    ROWS_AT_ONCE,
    plain_row,
    require_pyarrow,
    result_schema,
    with_json_values,
)
from llmpq.jobs.formats.python_rows import rows_named_by_content
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Row

ROWS_PER_BLOCK = 4096


def rows_in(dataset: Any) -> Iterator[Row | BadRow]:
    """The rows of a dataset of prompts, batch by batch; raises `InputError` as `rows_of` does."""
    require_pyarrow()
    return rows_named_by_content(_plain_rows(dataset))


def dataset_of(results: Iterable[Result]) -> Any:
    """A dataset of results, each block put into the object store as soon as it is full.

    Blocks whose rows' own columns are of another kind than those of other blocks are made again in
    the end: a dataset has one schema.
    """
    import ray

    rest = iter(results)
    blocks: list[tuple[Any, Mapping[str, Kind]]] = []
    own = ColumnKinds()
    while taken := [result.as_dict() for result in islice(rest, ROWS_PER_BLOCK)]:
        here = ColumnKinds()
        here.note(taken)
        own.add(here)
        blocks.append((ray.put(_table(taken, here)), here.kinds))
    alike: list[Any] = [
        block if kinds == own.kinds else ray.put(_again(ray.get(block), own))
        for block, kinds in blocks
    ]
    return ray.data.from_arrow_refs(alike)


def _table(rows: Iterable[Mapping[str, Any]], own: ColumnKinds) -> Any:
    import pyarrow as pa

    return pa.Table.from_pylist([own.cells(row) for row in rows], result_schema(own))


def _again(table: Any, own: ColumnKinds) -> Any:
    """The rows of a block in a table of other columns."""
    return _table(with_json_values(table.to_pylist(), table.schema), own)


def _plain_rows(dataset: Any) -> Iterator[Mapping[str, Any]]:
    for batch in dataset.iter_batches(batch_size=ROWS_AT_ONCE, batch_format="pyarrow"):
        yield from map(plain_row, batch.to_pylist())
