"""Job input: files, folders and globs of JSONL and Parquet, ids from content, bad rows by place."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmpq.jobs.inputs import JobInput
from llmpq.rows.row import BadRow, Row
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import write_prompts


def rows_of(*named: Path | str) -> list[Row | BadRow]:
    return [placed.row for placed in JobInput.find(list(named)).rows()]


def ids_of(*named: Path | str) -> list[str]:
    return [row.custom_id for row in rows_of(*named)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_prompts(tmp_path / "b.jsonl", {"custom_id": "b0", "prompt": "x"}, "{")
    write_prompts(tmp_path / "a.ndjson", {"custom_id": "a0", "prompt": "x"}, "", "[1]")
    line = json.dumps({"custom_id": "c0", "prompt": "x"}) + "\n"
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (tmp_path / "notes.txt").write_text("no prompts")
    return tmp_path


def test_files_folders_and_globs(folder: Path) -> None:
    everything = ["a0", "a.ndjson:3", "b0", "b.jsonl:2", "c0"]
    assert ids_of(folder) == everything
    assert ids_of(folder / "b.jsonl", folder / "a.ndjson") == [*everything[2:4], *everything[:2]]
    assert ids_of(f"{folder}/*.jsonl*") == everything[2:]
    assert ids_of(folder, folder / "b.jsonl") == everything
    (folder / "deep").mkdir()
    write_prompts(folder / "deep" / "b.jsonl", "{")
    assert ids_of(f"{folder}/**/b.jsonl") == ["b0", "b.jsonl:2", "deep/b.jsonl:1"]


def test_what_is_no_input(folder: Path, tmp_path: Path) -> None:
    (folder / "empty").mkdir()
    for name in ("missing.jsonl", "empty", "*.csv"):
        with pytest.raises(InputError, match="cannot read input"):
            JobInput.find([folder / name])
    os.mkfifo(folder / "pipe")
    with pytest.raises(InputError, match="twice"):
        JobInput.find([folder / "pipe"])
    (folder / "torn.jsonl.gz").write_bytes((folder / "c.jsonl.gz").read_bytes()[:-12])
    with pytest.raises(InputError, match=r"torn\.jsonl\.gz"):
        rows_of(folder / "torn.jsonl.gz")


def test_ids_made_from_content_stay_when_rows_move(tmp_path: Path) -> None:
    lines: list[Any] = [{"prompt": f"p{i % 20}"} for i in range(50)]
    lines += [{"prompt": "p0", "temperature": 1}, {"prompt": [1, 2]}]
    lines += [{"messages": [{"role": "user", "content": "p0"}]}]
    before = ids_of(write_prompts(tmp_path / "before.jsonl", *lines))
    assert len(set(before)) == len(lines)
    assert before[:20] == [name.removesuffix("-2") for name in before[20:40]]
    random.Random(1).shuffle(lines)
    shuffled = ids_of(write_prompts(tmp_path / "after.jsonl", *lines, {"prompt": "new"}))
    assert set(before) < set(shuffled)
    assert len(set(shuffled)) == len(lines) + 1


def test_long_lines_and_other_encodings_are_rows_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmpq.jobs.file_format.MAX_LINE_BYTES", 1000)
    path = tmp_path / "odd.jsonl"
    good = b'{"custom_id": "%s", "prompt": "x"}\n'
    long = b"x" * 2005 + b"\n"
    path.write_bytes(b"\xef\xbb\xbf" + good % b"a" + b'{"prompt": "\xe9"}\n' + long + good % b"b")
    first, latin, endless, last = rows_of(path)
    assert (first.custom_id, last.custom_id) == ("a", "b")
    assert isinstance(latin, BadRow)
    assert isinstance(endless, BadRow)
    assert "UTF-8 (byte 12" in latin.error
    assert "more than 1000 bytes" in endless.error
    assert endless.custom_id == "odd.jsonl:3"


def test_parquet_rows_are_those_of_jsonl(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    lines: list[dict[str, Any]] = [
        {"custom_id": "a", "prompt": "text", "temperature": 0.5},
        {"prompt": "no id", "stop": ["x", "y"]},
        {"custom_id": "c", "messages": chat, "max_new_tokens": 3},
    ]
    lines += [{"custom_id": f"n{i}", "prompt": "many"} for i in range(5000)]
    pq.write_table(pa.Table.from_pylist(lines), tmp_path / "p.parquet", row_group_size=999)
    names = ("custom_id", "prompt", "messages", "temperature", "stop", "max_new_tokens")
    wide = [{name: line.get(name) for name in names} for line in lines]
    pq.write_table(pa.Table.from_pylist(wide), tmp_path / "p.parquet", row_group_size=999)
    same = write_prompts(tmp_path / "p.jsonl", *lines)
    assert rows_of(tmp_path / "p.parquet") == rows_of(same)
    texts = [{"custom_id": "c", "messages": json.dumps(chat)}, {"custom_id": "d", "messages": "{"}]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "t.parquet")
    good, bad = rows_of(tmp_path / "t.parquet")
    assert good == Row("c", messages=tuple(chat))
    assert isinstance(bad, BadRow)
    pq.write_table(pa.table({"prompt": [[1, 2], None]}), tmp_path / "ids.parquet")
    tokens, nothing = rows_of(tmp_path / "ids.parquet")
    assert isinstance(tokens, Row)
    assert tokens.token_ids == (1, 2)
    assert nothing.custom_id == "ids.parquet:2"
    (tmp_path / "no.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(InputError, match=r"no\.parquet"):
        rows_of(tmp_path / "no.parquet")


@pytest.mark.parametrize(
    "column",
    [
        pa.array([2**62], pa.timestamp("us")),
        pa.array([2**62], pa.duration("s")),
        pa.array([2**30], pa.date32()),
        pa.array([1], pa.timestamp("us", tz="Nowhere/X")),
    ],
    ids=lambda column: str(column.type),
)
def test_values_that_python_has_no_form_of_name_the_file(column: pa.Array, tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "time": column}), path)
    with pytest.raises(InputError, match=r"in\.parquet cannot be read as Parquet: "):
        rows_of(path)


def test_a_text_that_stands_once_for_many_rows_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of some kilobytes, whose rows together have 128 MiB."""
    text = "a" * 2**20
    path = tmp_path / "in.parquet"
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 128, pa.int32()), pa.array([text]))
    pq.write_table(pa.table({"prompt": column}), path, compression="zstd")
    monkeypatch.setattr("llmpq.jobs.parquet.DECODED_BYTES", 2**22)
    before = pa.total_allocated_bytes()
    most = rows = 0
    for placed in JobInput.find([path]).rows():
        assert isinstance(placed.row, Row)
        rows += placed.row.text == text
        most = max(most, pa.total_allocated_bytes() - before)
    assert rows == 128
    assert most < 2**25
