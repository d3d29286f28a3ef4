"""Own columns of rows in outputs of every format: after a stop, in error rows and in tables."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmpq.jobs.file_format import SUFFIXES
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import JobOptions
from llmpq.jobs.parquet import (
    MOST_COLUMNS,
    ColumnKinds,
    read_results,
    with_json_values,
    write_results,
)
from llmpq.rows.row import BadRow
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import (
    EXTEND,
    OVERWRITE,
    content_of,
    read_rows,
    results_in,
    run_job,
    write_prompts,
)

pytestmark = pytest.mark.usefixtures("no_waiting")

COLUMNS: list[dict[str, Any]] = [
    {"topic": "a", "metadata": {"page": 1}},
    {"topic": 'b, "quoted"\nline', "tags": ["x", "y"]},
    {"topic": "007", "score": 1, "metadata": {"page": 2, "by": None}},
    {"score": 0.5, "tags": [], "mixed": "text", "big": 2**62},
    {"mixed": 4, "good": True, "text": "of the data"},
]
ROWS = [{"custom_id": f"q{i}", "prompt": f"bad {i}"[i == 1 :]} | c for i, c in enumerate(COLUMNS)]
KEPT = [{("input_text" if n == "text" else n): v for n, v in c.items()} for c in COLUMNS]
NAMES = {name for row in KEPT for name in row}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "in.jsonl", *ROWS)


def own(target: Path) -> list[dict[str, Any]]:
    """The own columns of the results, in the order of their ids, without what is missing."""
    found = results_in(target)
    if target.suffix == ".parquet":
        found = {str(row["custom_id"]): dict(row) for row in read_results(target, None)}
    return [
        {n: v for n, v in found[f"q{i}"].items() if n in NAMES and v not in (None, "")}
        for i in range(len(found))
    ]


def in_format(columns: dict[str, Any], suffix: str) -> dict[str, Any]:
    """The columns as a format has them: CSV knows texts alone."""
    if ".csv" not in suffix:
        return columns
    texts = {n: v if isinstance(v, str) else json.dumps(v) for n, v in columns.items()}
    return texts


@pytest.mark.parametrize("suffix", [*SUFFIXES, "/"])
def test_columns_come_out_after_stops_extensions_and_retries(
    suffix: str, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / f"out{suffix.rstrip('/')}"
    named = f"{target}{'/' * suffix.endswith('/')}"
    expected = [in_format(each, suffix) for each in KEPT]
    write_prompts(source, *ROWS[:3])
    run_job(source, named, limit=1)
    run_job(source, named)
    assert own(target) == expected[:3]
    write_prompts(source, *ROWS)
    run_job(source, named, job_options=EXTEND)
    assert own(target) == expected
    failed = [row["custom_id"] for row in results_in(target).values() if row["error"]]
    assert failed == ["q0", "q2", "q3", "q4"]
    assert run_job(source, named, job_options=JobOptions(retry_errors=True)).left == len(failed)
    assert own(target) == expected
    run_job(source, named, OVERWRITE)
    assert own(target) == expected


def test_a_table_has_the_known_columns_first_and_types_where_all_values_agree(
    source: Path, tmp_path: Path
) -> None:
    run_job(source, tmp_path / "out.parquet")
    schema = pq.read_schema(tmp_path / "out.parquet")
    known = ["custom_id", "text", "token_ids", "finish_reason", "error", "fingerprint"]
    own_names = ["topic", "metadata", "tags", "score", "mixed", "big", "good", "input_text"]
    assert schema.names == [*known, *own_names]
    types = {name: str(schema.field(name).type) for name in own_names}
    assert types == {
        "topic": "string",
        "metadata": "string",
        "tags": "list<element: string>",
        "score": "double",
        "mixed": "string",
        "big": "int64",
        "good": "bool",
        "input_text": "string",
    }
    rows = {row["custom_id"]: row for row in pq.read_table(tmp_path / "out.parquet").to_pylist()}
    assert json.loads(rows["q0"]["metadata"]) == {"page": 1}
    assert (rows["q3"]["mixed"], rows["q4"]["mixed"]) == ('"text"', "4")
    assert rows["q0"]["tags"] is None
    run_job(source, tmp_path / "out.csv")
    header = next(csv.reader(io.StringIO(content_of(tmp_path / "out.csv"), "")))
    assert header == [*known, *own_names]


def test_a_result_goes_on_as_the_input_of_another_job(source: Path, tmp_path: Path) -> None:
    """The text of a first job is the prompt of a second: its other columns come along."""
    for suffix in (".jsonl", ".parquet"):
        run_job(source, tmp_path / f"out{suffix}")
        again = [dict(row.columns) for row in read_rows(_as_prompts(tmp_path / f"out{suffix}"))]
        kept = [{n: v for n, v in row.items() if n in NAMES and v is not None} for row in again]
        assert kept == [{n: v for n, v in c.items() if n != "input_text"} for c in KEPT]


def _as_prompts(path: Path) -> Path:
    """The results of a job as rows whose prompt is their id."""
    made = path.with_name(f"next{path.suffix}")
    drop = {"input_text", "text", "error", "token_ids", "finish_reason", "fingerprint"}
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        table = table.drop_columns([name for name in table.column_names if name in drop])
        pq.write_table(table.append_column("prompt", table["custom_id"]), made)
        return made
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [{n: v for n, v in r.items() if n not in drop} | {"prompt": "p"} for r in rows]
    return write_prompts(made, *kept)


def test_csv_inputs_keep_their_texts_as_they_are(tmp_path: Path) -> None:
    text = 'prompt,zip,version,flag,n\np,00120,1.10,TRUE,1\n"q",,,"[1, 2]",\n'
    (tmp_path / "in.csv").write_text(text)
    first, second = read_rows(tmp_path / "in.csv")
    assert first.columns == {"zip": "00120", "version": "1.10", "flag": "TRUE"}
    assert second.columns == {"flag": "[1, 2]"}


def test_parquet_inputs_keep_their_nested_values(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "meta": {"a": 1, "b": [None, "x"]}, "at": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    (row,) = read_rows(tmp_path / "in.parquet")
    assert row.columns == {"meta": {"a": 1, "b": [None, "x"]}}


def test_a_changed_column_runs_no_row_again(source: Path, tmp_path: Path) -> None:
    """The result stays as it was made, with the columns of then."""
    run_job(source, tmp_path / "out.jsonl")
    write_prompts(source, *(row | {"topic": "new"} for row in ROWS))
    assert run_job(source, tmp_path / "out.jsonl").left == 0
    assert own(tmp_path / "out.jsonl") == KEPT
    run_job(source, tmp_path / "out.jsonl", OVERWRITE)
    assert {row["topic"] for row in own(tmp_path / "out.jsonl")} == {"new"}


def test_bad_rows_keep_their_columns(tmp_path: Path) -> None:
    rows = [{"topic": "t", "prompt": 1}, {"custom_id": "b", "temprature": 1, "topic": "u"}]
    source = write_prompts(tmp_path / "in.jsonl", *rows)
    run_job(source, tmp_path / "out.csv.gz")
    text = gzip.decompress((tmp_path / "out.csv.gz").read_bytes()).decode()
    found = list(csv.DictReader(io.StringIO(text, "")))
    assert [(row["topic"], row["temprature"]) for row in found] == [("t", ""), ("u", "1")]
    assert "is temperature meant?" in found[1]["error"]
    assert all(isinstance(placed.row, BadRow) for placed in JobInput.find([source]).rows())


def test_a_table_of_too_many_columns_is_refused_before_anything_runs(tmp_path: Path) -> None:
    rows = [{"prompt": "p", f"c{i}": i} for i in range(MOST_COLUMNS + 1)]
    source = write_prompts(tmp_path / "in.jsonl", *rows)
    with pytest.raises(InputError, match=r"more than 1000 own columns.*ends in \.jsonl"):
        run_job(source, tmp_path / "out.parquet")
    assert run_job(source, tmp_path / "out.jsonl").left == len(rows)
    write_prompts(source, *rows[:-1])
    run_job(source, tmp_path / "out.csv")
    assert len(content_of(tmp_path / "out.csv").split("\n", 1)[0].split(",")) == 6 + MOST_COLUMNS


def test_kinds_of_all_pairs_hold_both_values() -> None:
    """A column of any two values gives both back, whichever comes first."""
    values: list[Any] = [None, True, 3, 2**60, 2**70, 0.5, "x", {"a": 1}]
    values += [[], [1], [0.5], [[]], [["x"]], [None], ["x", 1], [{"a": 1}], [[[[1]]]]]
    for one in values:
        for other in values:
            kinds = ColumnKinds()
            kinds.note([{"c": one}, {"c": other}])
            sink = pa.BufferOutputStream()
            _write(sink, kinds, [one, other])
            found = [row.get("c") for row in _read(sink)]
            assert found == [one, other], (one, other)


def _write(sink: Any, kinds: ColumnKinds, values: list[Any]) -> None:
    empty = dict.fromkeys(("text", "finish_reason", "error"), None)
    rows = [
        {"custom_id": "a", **empty, "token_ids": [], "fingerprint": "f", "c": v} for v in values
    ]
    write_results(sink, rows, kinds)


def _read(sink: Any) -> list[dict[str, Any]]:
    table = pq.read_table(pa.BufferReader(sink.getvalue()))
    return [dict(row) for row in with_json_values(table.to_pylist(), table.schema)]
