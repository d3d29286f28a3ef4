"""Results as tables, and tables as rows."""

from __future__ import annotations

import sys
from typing import Any

import numpy
import pandas
import pyarrow
import pytest

from llmpq import Result, SpecError
from llmpq.dataframes import to_arrow, to_pandas, to_polars
from llmpq.jobs.python_rows import rows_of
from llmpq.rows.row import Row
from quant.common.errors import InputError

RESULTS = [
    Result("a", "first", (5, 6), "stop"),
    Result("b", None, (), None, "the prompt has no tokens"),
]
COLUMNS = ["custom_id", "text", "token_ids", "finish_reason", "error"]
PROMPTS: dict[str, list[Any]] = {
    "custom_id": ["a", "b", "c"],
    "prompt": ["one", "two", "three"],
    "max_new_tokens": [5, None, 7],
    "temperature": [0.5, 1.0, None],
}


class Topical(Result):
    """A result that has columns of its own row, as `as_dict` gives them."""

    def __init__(self, custom_id: str, **own: Any) -> None:
        super().__init__(custom_id, "text", (1,), "stop")
        object.__setattr__(self, "own", own)

    def as_dict(self) -> dict[str, Any]:
        known = {name: getattr(self, name) for name in COLUMNS}
        return known | self.own  # type: ignore[attr-defined, no-any-return]


def plain(table: Any) -> list[dict[str, Any]]:
    """The rows of any of the tables."""
    if isinstance(table, pandas.DataFrame):
        return table.to_dict("records")
    return table.to_pylist() if isinstance(table, pyarrow.Table) else table.to_dicts()


@pytest.fixture(params=["pandas", "arrow", "polars"])
def make(request: pytest.FixtureRequest) -> Any:
    if request.param == "polars":
        pytest.importorskip("polars")
    return {"pandas": to_pandas, "arrow": to_arrow, "polars": to_polars}[request.param]


def test_results_become_a_table(make: Any) -> None:
    found = plain(make(iter(RESULTS)))
    assert found == [
        {"custom_id": "a", "text": "first", "token_ids": [5, 6], "finish_reason": "stop",
         "error": None},
        {"custom_id": "b", "text": None, "token_ids": [], "finish_reason": None,
         "error": "the prompt has no tokens"},
    ]  # fmt: skip
    empty = make([])
    assert list(getattr(empty, "column_names", empty.columns)) == COLUMNS
    assert len(empty) == 0


def test_columns_of_rows_follow_the_known_ones(make: Any) -> None:
    """Values of unlike types become JSON text where a column must have one type."""
    results = [
        Topical("a", topic="x", score=1.5, mixed=1, nested={"k": [1]}),
        Topical("b", score=2.5, mixed="two", nested={"k": [2]}),
    ]
    first, second = plain(make(results))
    assert list(first) == [*COLUMNS, "topic", "score", "mixed", "nested"]
    assert (first["topic"], second["topic"]) == ("x", None)
    assert (first["score"], second["score"]) == (1.5, 2.5)
    assert [first["mixed"], second["mixed"]] in ([1, "two"], ["1", '"two"'])
    assert first["nested"] == {"k": [1]}


def test_a_library_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for library, make, extra in (
        ("pandas", to_pandas, "data"),
        ("pyarrow", to_arrow, "data"),
        ("polars", to_polars, "polars"),
    ):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(SpecError, match=rf"{library}.*pip install 'llmpq\[{extra}\]'"):
            make(RESULTS)


def polars_frame(lazy: bool) -> Any:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(PROMPTS)
    return frame.lazy() if lazy else frame


@pytest.mark.parametrize("kind", ["pandas", "arrow", "reader", "batch", "stream", "polars", "lazy"])
def test_tables_are_rows(kind: str) -> None:
    """What is missing in a row is not set there; whole numbers stay whole beside missing ones."""
    table: Any
    if kind == "pandas":
        table = pandas.DataFrame(PROMPTS)
    elif kind in ("polars", "lazy"):
        table = polars_frame(kind == "lazy")
    else:
        table = pyarrow.table(PROMPTS)
        table = table.to_reader() if kind == "reader" else table
        table = table.to_batches()[0] if kind == "batch" else table
        table = OnlyStream(table) if kind == "stream" else table
    assert list(rows_of(table)) == [
        Row("a", text="one", sampling={"max_new_tokens": 5, "temperature": 0.5}),
        Row("b", text="two", sampling={"temperature": 1.0}),
        Row("c", text="three", sampling={"max_new_tokens": 7}),
    ]


class OnlyStream:
    """A table of another library, such as DuckDB, that only gives Arrow's stream."""

    def __init__(self, table: pyarrow.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def test_token_ids_of_a_table_are_prompts() -> None:
    """Also as pandas reads them from Parquet: arrays of numpy."""
    table = pyarrow.table({"prompt": [[3, 4], [5]]})
    for each in (table, table.to_pandas()):
        assert [row.token_ids for row in rows_of(each) if isinstance(row, Row)] == [(3, 4), (5,)]
        assert [row.custom_id for row in rows_of(each)] == ["row-0", "row-1"]


@pytest.mark.parametrize("kind", ["pandas", "arrow", "array", "polars", "numpy"])
def test_a_column_is_prompts(kind: str) -> None:
    for prompts, expected in (
        (["one", "two"], ["one", "two"]),
        ([[3, 4], [5, 6]], [(3, 4), (5, 6)]),
    ):
        column: Any = pandas.Series(prompts)
        if kind == "polars":
            column = pytest.importorskip("polars").Series(prompts)
        elif kind == "numpy":
            column = numpy.array(prompts)
        elif kind != "pandas":
            column = pyarrow.array(prompts)
            column = pyarrow.chunked_array([column]) if kind == "arrow" else column
        rows = [row for row in rows_of(column) if isinstance(row, Row)]
        assert [row.text or row.token_ids for row in rows] == expected


def test_a_table_that_cannot_be_rows_is_refused() -> None:
    with pytest.raises(InputError, match="no prompts"):
        list(rows_of(pandas.DataFrame({"prompt": []})))
    double = pandas.DataFrame([["a", "b"]], columns=["prompt", "prompt"])
    with pytest.raises(InputError, match="two columns 'prompt'"):
        list(rows_of(double))
