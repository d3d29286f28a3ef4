"""A plan as a stage of Ray Data: a dataset of prompts in, the same with answers out, with the names
of columns that Ray Data's own stages for language models have.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from llmpq.dataframes import to_arrow
from llmpq.jobs.file_format import require_pyarrow
from llmpq.jobs.parquet import plain_row
from llmpq.keywords import RunKeywords, lists_options
from llmpq.plan import Fleet, Plan
from llmpq.rows.fields import is_field, may_be_field, nearest_field
from llmpq.rows.results import MADE_COLUMNS, Result
from llmpq.rows.sampling import SamplingInput
from llmpq.run.engine import CheckedModel
from llmpq.run.options import RunOptions
from quant.common.errors import SpecError

if TYPE_CHECKING:
    from typing import Unpack

    import pyarrow
    from ray.data import Dataset

RowFunction = Callable[[dict[str, Any]], dict[str, Any]]

BATCH_SIZE = 1024
"""Rows that are given to the stages at once; slots run empty at the end of each batch."""

_NAMES = {
    "text": "generated_text",
    "token_ids": "generated_tokens",
    "finish_reason": "finish_reason",
    "error": "error",
    **{name: name for name in MADE_COLUMNS},
}
"""The columns of results, and what they are called here."""


@lists_options(RunKeywords, RunOptions)
def processor(
    plan: Plan | Fleet,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
    *,
    sampling: SamplingInput = None,
    batch_size: int = BATCH_SIZE,
    **options: Unpack[RunKeywords],
) -> Callable[[Dataset], Dataset]:
    """What makes of a `ray.data.Dataset` of prompts one with answers, when that is consumed.

    Rows have `prompt` or `messages`, and may have `sampling_params` and the other fields of a JSONL
    line; a `custom_id` is a column like others. Rows keep their order and their columns, and get
    `generated_text`, `generated_tokens`, `num_input_tokens`, `num_generated_tokens`,
    `finish_reason` and `error`, which says why a row could not run, while the others do.

    What `preprocess` makes of a row is put beside its columns; what `postprocess` makes of it takes
    their place, but for `error`. Rows with an error pass it by. The stages stay loaded while the
    dataset is consumed, in an actor on this node, which blocks reach through the object store.

    `options` are those of `Plan.run`. Raises what that raises before anything is started; what is
    raised later comes through Ray Data.
    """
    require_pyarrow("Datasets")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise SpecError(f"batch_size is {batch_size!r:.80}; it must be a whole number from 1 on")
    given = {"sampling": sampling, **options}
    CheckedModel(plan.spec, RunOptions.of(given))

    def process(dataset: Dataset) -> Dataset:
        if preprocess is not None:
            dataset = dataset.map(partial(_beside, preprocess))
        dataset = _generated(dataset, plan, given, batch_size)
        if postprocess is not None:
            dataset = dataset.map(partial(_unless_error, postprocess))
        dataset.context.execution_options.preserve_order = True
        return dataset

    return process


def _generated(
    dataset: Dataset, plan: Plan | Fleet, options: Mapping[str, Any], batch_size: int
) -> Dataset:
    import ray
    from ray.data import ActorPoolStrategy

    # Where paths mean what they mean here. Ray is joined or started by what made the dataset.
    node = ray.get_runtime_context().get_node_id()
    # It waits for stages, which reserve CPUs of their own, and so takes none.
    return dataset.map_batches(
        _Generation,
        fn_constructor_args=(type(plan), plan.spec, dict(options), os.getcwd()),
        # Of several tasks any may come first, and draws go by the number of a row.
        compute=ActorPoolStrategy(size=1, max_tasks_in_flight_per_actor=1),
        batch_size=batch_size,
        batch_format="pyarrow",
        num_cpus=0,
        label_selector={"ray.io/node-id": node},
    )


def _beside(preprocess: RowFunction, row: dict[str, Any]) -> dict[str, Any]:
    return {**row, **preprocess(row)}


def _unless_error(postprocess: RowFunction, row: dict[str, Any]) -> dict[str, Any]:
    return row if row["error"] is not None else {**postprocess(row), "error": None}


class _Generation:
    """What Ray Data's actor keeps: the session of a plan, and how many rows it has been given."""

    def __init__(
        self, kind: type[Plan | Fleet], spec: Any, options: Mapping[str, Any], folder: str
    ) -> None:
        os.chdir(folder)  # Ray's workers start elsewhere, and paths may be relative
        self._session = kind(spec).session(**options)
        weakref.finalize(self, self._session.close)
        self._session.start()
        self._rows = 0

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        """`batch` with the columns of answers; draws go by the number of a row, as of a list."""
        if not batch.num_rows:
            return batch
        names = [f"row-{self._rows + i}" for i in range(batch.num_rows)]
        self._rows += batch.num_rows
        read = batch.select([name for name in batch.column_names if may_be_field(name)])
        rows = [
            {**_fields(plain_row(row)), "custom_id": name}
            for row, name in zip(read.to_pylist(), names, strict=True)
        ]
        found = {result.custom_id: result for result in self._session.run(rows)}
        return _with_answers(batch, [found[name] for name in names])


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """What of a row is read: its other columns need not be such as JSON has, and stay where they
    are.
    """
    return {
        name: value
        for name, value in row.items()
        if is_field(name, value, row) or nearest_field(name)
    }


def _with_answers(batch: pyarrow.Table, results: Sequence[Result]) -> pyarrow.Table:
    """`batch` with a column for each of the `results`' fields, in the place of one of its name."""
    import pyarrow as pa

    table = to_arrow(results)
    made = {ours: table[name] for name, ours in _NAMES.items() if name in table.column_names}
    prompts = [result.prompt_tokens for result in results]
    made["num_input_tokens"] = pa.array(prompts, pa.int64())
    answers = [len(result.token_ids) for result in results]
    made["num_generated_tokens"] = pa.array(answers, pa.int64())
    kept = {name: batch[name] for name in batch.column_names if name not in made}
    return pa.table({**kept, **made})
