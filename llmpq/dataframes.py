"""Results as a table of pandas, polars or Arrow: one row each, the columns as in an output file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from llmpq.rows.results import RESULT_FIELDS, Result
from quant.common.errors import SpecError

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

EXTRAS = {"pandas": "data", "pyarrow": "data", "polars": "polars"}
"""The extra of llmpq that brings each library."""


def to_pandas(results: Iterable[Result]) -> pandas.DataFrame:
    """A pandas DataFrame; raises `SpecError` where pandas is not installed."""
    library = _required("pandas")
    columns = _columns(results)
    return library.DataFrame({name: _objects(library, values) for name, values in columns.items()})


def to_polars(results: Iterable[Result]) -> polars.DataFrame:
    """A polars DataFrame; raises `SpecError` where polars is not installed."""
    library = _required("polars")
    text = library.String
    known = dict.fromkeys(RESULT_FIELDS, text) | {"token_ids": library.List(library.Int64)}
    made = []
    for name, values in _columns(results).items():
        if name in known:
            series = library.Series(name, values, dtype=known[name])
        else:
            try:
                series = library.Series(name, values, strict=True)
            except (TypeError, ValueError, library.exceptions.PolarsError):
                series = library.Series(name, _as_json(values), dtype=text)
        made.append(series)
    table: polars.DataFrame = library.DataFrame(made)
    return table


def to_arrow(results: Iterable[Result]) -> pyarrow.Table:
    """An Arrow table; raises `SpecError` where pyarrow is not installed."""
    library = _required("pyarrow")
    known = dict.fromkeys(RESULT_FIELDS, library.string()) | {
        "token_ids": library.list_(library.int64())
    }
    made = {}
    for name, values in _columns(results).items():
        try:
            made[name] = library.array(values, known.get(name))
        except (library.ArrowException, TypeError, OverflowError):
            made[name] = library.array(_as_json(values), library.string())
    return library.table(made)


def _columns(results: Iterable[Result]) -> dict[str, list[Any]]:
    """Values by column, in the order in which columns are met; None where a row has none."""
    rows = [result.as_dict() for result in results]
    names = dict.fromkeys(RESULT_FIELDS)
    for row in rows:
        names |= dict.fromkeys(row)
        row["token_ids"] = list(row["token_ids"])
    return {name: [row.get(name) for row in rows] for name in names}


def _objects(library: Any, values: Sequence[Any]) -> Any:
    """A column as pandas makes it, but of objects where it has texts or None, which stays None."""
    plain = all(isinstance(value, bool | int | float) for value in values) and values
    return library.Series(values, dtype=None if plain else object)


def _as_json(values: Sequence[Any]) -> list[str | None]:
    """The values of a column that are of unlike types, as JSON text."""
    return [
        None if value is None else json.dumps(value, ensure_ascii=False, default=str)
        for value in values
    ]


def _required(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise SpecError(
            f"results in this form need {name}, which is not installed: pip install "
            f"'llmpq[{EXTRAS[name]}]'"
        ) from error
