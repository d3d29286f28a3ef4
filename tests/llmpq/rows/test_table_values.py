"""Values of tables and databases in rows are those of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from actors.messages import Sampling
from llmpq.jobs.parquet import parquet_rows
from llmpq.jobs.python_rows import rows_of
from llmpq.jobs.text_files import csv_rows
from llmpq.rows.row import BadRow, Row, row_from_mapping
from llmpq.rows.sampling import merge_sampling
from tests.llmpq.rows.test_fields import CHAT, error_of, row_of


def rows_with_gaps() -> pd.DataFrame:
    """A table in which pandas holds whole numbers as floats."""
    return pd.DataFrame(
        {
            "custom_id": list("abc"),
            "prompt": ["p", None, "p"],
            "messages": [None, json.dumps(CHAT), None],
            "max_tokens": [3, None, 4],
            "seed": [5, None, None],
            "temperature": [0, None, 0.5],
            "top_k": [None, None, 2],
            "min_tokens": [1, None, None],
            "topic": [7, None, 8],
        }
    )


def test_floats_of_pandas_are_whole_numbers_in_every_format(tmp_path: Path) -> None:
    frame = rows_with_gaps()
    frame.to_csv(tmp_path / "in.csv", index=False)
    frame.to_parquet(tmp_path / "in.parquet")
    frame.to_json(tmp_path / "in.jsonl", orient="records", lines=True)
    lines = (tmp_path / "in.jsonl").read_text().replace("null", "NaN").splitlines()
    tables: dict[str, list[Mapping[str, Any]]] = {
        "csv": [row for _, row in csv_rows(tmp_path / "in.csv", "") if not isinstance(row, str)],
        "parquet": list(parquet_rows(tmp_path / "in.parquet")),
        "jsonl": [{**json.loads(line)} for line in lines],
        "python": frame.to_dict("records"),
    }
    for each in tables["jsonl"], tables["python"]:  # the texts that files of tables hold as JSON
        each[1]["messages"] = CHAT  # type: ignore[index]
    read = {name: [row_from_mapping(r, "f") for r in rows] for name, rows in tables.items()}
    read["frame"] = list(rows_of(frame))
    for name, found in read.items():
        samplings = []
        for row in found:
            assert isinstance(row, Row), (name, row)
            samplings.append(merge_sampling(Sampling(), row.sampling))
            assert type(row.sampling.get("max_new_tokens", 0)) is int  # the job counts with it
        assert samplings == [
            Sampling(0.0, 0, 1.0, 5, 3, min_tokens=1),
            Sampling(),
            Sampling(0.5, 2, max_new_tokens=4),
        ], name
        assert [bool(row.messages) for row in found if isinstance(row, Row)] == [False, True, False]


def test_decimals_of_databases_are_numbers() -> None:
    given = {"temperature": Decimal("0.5"), "max_tokens": Decimal(3), "n": Decimal("1.00"),
             "top_p": Decimal("sNaN")}  # fmt: skip
    row = row_from_mapping({"prompt": "a", "price": Decimal("1.10"), **given}, "1")
    assert isinstance(row, Row)
    assert row.sampling == {"temperature": 0.5, "max_new_tokens": 3}
    assert row.columns == {"price": "1.10"}
    assert isinstance(row_from_mapping({"prompt": "a", "top_p": Decimal(2)}, "1"), BadRow)


def test_values_of_numpy_are_those_of_python() -> None:
    given = {
        "prompt": np.array([1, 2]),
        "max_tokens": np.int64(3),
        "top_p": np.float32(0.5),
        "ignore_eos": np.bool_(True),
        "seed": np.float64("nan"),
        "stop": np.array(["x"]),
        "stop_token_ids": np.array([4.0, 5.0]),
        "logit_bias": {"7": np.float32(0.5), "8": np.int64(1)},
        "top_k": pd.NA,
    }
    row = row_of(**given)
    assert isinstance(row, Row), row
    assert row.token_ids == (1, 2)
    assert merge_sampling(Sampling(), row.sampling) == Sampling(
        top_p=0.5, max_new_tokens=3, stop=("x",), ignore_eos=True, stop_token_ids=(4, 5),
        logit_bias={7: 0.5, 8: 1.0},
    )  # fmt: skip
    assert all(type(token) is int for token in row.token_ids or ())


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([1.0, 2.0], (1, 2)),
        ([np.int64(1), np.float64(2)], (1, 2)),
        ((1, 2), (1, 2)),
        ([1, 2.5], None),
        ([1, float("nan")], None),
        ([True, 2], None),
        ([np.bool_(True)], None),
        (np.array([[1, 2]]), None),
        ([-1.0], None),
    ],
)
def test_token_ids_of_tables(ids: Any, found: tuple[int, ...] | None) -> None:
    row = row_of(prompt=ids)
    assert getattr(row, "token_ids", None) == found
    assert found or "whole numbers of at least 0" in error_of(prompt=ids)
