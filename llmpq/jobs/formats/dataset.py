"""Ray Datasets of prompts and of results; needs pyarrow and pandas (the extra `data`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from llmpq.jobs.formats.parquet import ROWS_AT_ONCE, plain_row, require_pyarrow, result_schema
from llmpq.jobs.formats.python_rows import rows_named_by_content
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Row

ROWS_PER_BLOCK = 4096


def rows_in(dataset: Any) -> Iterator[Row | BadRow]:
    """The rows of a dataset of prompts, batch by batch; raises `InputError` as `rows_of` does."""
    require_pyarrow()
    return rows_named_by_content(_plain_rows(dataset))


def dataset_of(results: Iterable[Result]) -> Any:
    """A dataset of results, each block put into the object store as soon as it is full."""
    import pyarrow as pa
    import ray

    rest = iter(results)
    blocks: list[Any] = []
    while taken := [result.as_dict() for result in islice(rest, ROWS_PER_BLOCK)]:
        blocks.append(ray.put(pa.Table.from_pylist(taken, result_schema())))
    return ray.data.from_arrow_refs(blocks)


def _plain_rows(dataset: Any) -> Iterator[Mapping[str, Any]]:
    for batch in dataset.iter_batches(batch_size=ROWS_AT_ONCE, batch_format="pyarrow"):
        yield from map(plain_row, batch.to_pylist())
