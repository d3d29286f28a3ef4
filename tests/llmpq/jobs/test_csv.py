"""Prompts in CSV and in compressed files: the rows of JSON lines, and files that are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from llmpq.cli import plan as plan_cli
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.text_files import csv_rows
from llmpq.rows.row import BadRow, Row
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import prompts, read_rows, write_prompts


def gzipped(data: bytes) -> bytes:
    """The same bytes in every test process: the names of cases are made of them."""
    return gzip.compress(data, mtime=0)


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


def rows_of(path: Path) -> list[Row | BadRow]:
    return [placed.row for placed in JobInput.find([path]).rows()]


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_rows_of_csv_are_those_of_json_lines(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": '"hi",\r\nbye'}]
    lines: list[dict[str, Any]] = [
        {"custom_id": "a", "prompt": 'two\nlines, and a "quote"', "temperature": 0.5},
        {"prompt": "no id", "top_k": 40, "stop": "END", "ignore_eos": True},
        {"custom_id": "c", "messages": chat, "max_new_tokens": 3, "stop": ["x", "y"]},
        {"custom_id": "007", "prompt": "1e3", "seed": 0, "logit_bias": {"5": -1}},
        {"custom_id": "t", "prompt": " true ", "max_tokens": 4, "temperature": 1.0},
    ]
    text = """\
custom_id,prompt,messages,temperature,top_k,stop,ignore_eos,max_new_tokens,seed,logit_bias,max_tokens
a,"two
lines, and a ""quote""\",,0.5,,,,,,,
,no id,,,40.0,END,TRUE,,,,

c,,"[{""role"": ""user"", ""content"": ""\\""hi\\"",\\r\\nbye""}]",,,"[""x"",""y""]",,3,,,
007,1e3,,,,,,,0,"{""5"": -1}",
t, true ,,1.0,,,,,,,4
"""
    same = rows_of(write_prompts(tmp_path / "p.jsonl", *lines))
    assert all(isinstance(row, Row) for row in same)
    assert rows_of(written(tmp_path / "p.csv", text)) == same
    dos = "\ufeff" + text.replace("\n", "\r\n").replace("two\r\n", "two\n")
    assert rows_of(written(tmp_path / "P.CSV", dos.rstrip())) == same
    assert rows_of(written(tmp_path / "p.csv.gz", gzipped(text.encode()))) == same
    assert rows_of(written(tmp_path / "p.csv.zst", zstd(text.encode()))) == same


def test_bad_rows_are_named_by_the_line_they_begin_in(tmp_path: Path) -> None:
    path = written(
        tmp_path / "p.csv",
        b'custom_id,prompt,top_k\na,"two\nlines",\nb,x\nc,x,1,2\nd,\xe9t\xe9,\n,,\n'
        b"f,x,many\ng,nul \x00 in it,\nh,fine,1.5\n",
    )
    found = rows_of(path)
    assert [(row.custom_id, getattr(row, "error", "")[:40]) for row in found] == [
        ("a", ""),
        ("p.csv:4", "2 cells, but the header names 3 columns"),
        ("p.csv:5", "4 cells, but the header names 3 columns"),
        ("p.csv:6", "not UTF-8"),
        ("p.csv:7", "a row needs exactly one of prompt and me"),
        ("f", "top_k is 'many'; it must be a whole numb"),
        ("g", ""),
        ("h", "top_k is 1.5; it must be a whole number"),
    ]
    assert found[0] == Row("a", text="two\nlines")
    wide = written(tmp_path / "wide.csv", f"prompt,colour\n{'x' * 300_000},\ny,red\n")
    long, coloured = rows_of(wide)
    assert isinstance(long, Row)
    assert len(long.text or "") == 300_000
    assert isinstance(coloured, Row)
    assert (long.columns, coloured.columns) == ({}, {"colour": "red"})


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"custom_id;prompt\na;b\n", "no column is called prompt or messages"),
        (b"a,b\n", "no column is called prompt"),
        (b",prompt\n0,x\n", "column 1 has no name in the header.*index=False"),
        (b"prompt,prompt\na,b\n", "names column 'prompt' twice"),
        (b'prompt\nfine\n"not closed\nat all\n', "begins in line 3 .*not closed"),
        (b'prompt\n"closed" too early\n', "begins in line 2 is no CSV"),
        (b"prompt\rold Mac\r", "line 1"),
        (b'{"prompt": "x"}\n{"prompt": "y"}\n', "stands for CSV, but it holds JSON lines"),
        ("prompt\nx\n".encode("utf-16"), "holds UTF-16"),
        (gzipped(b"prompt\nx\n"), "stands for CSV, but it holds gzip; name it by what"),
    ],
)
def test_a_csv_file_that_cannot_be_understood_is_refused(
    data: bytes, match: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=rf"cannot read .*in\.csv.*{match}"):
        rows_of(written(tmp_path / "in.csv", data))


def test_a_header_of_many_columns_is_read_in_no_time(tmp_path: Path) -> None:
    names = ",".join(f"c{number}" for number in range(100_000))
    source = written(tmp_path / "in.csv", f"prompt,{names}\nx{',' * 100_000}\n")
    (row,) = rows_of(source)
    assert isinstance(row, Row)
    assert row.text == "x"


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("in.jsonl", gzipped(b'{"prompt": "x"}\n'), "JSON lines, but it holds gzip"),
        ("in.jsonl", zstd(b'{"prompt": "x"}\n'), "JSON lines, but it holds Zstandard"),
        ("in.jsonl", b"custom_id,prompt\na,x\n", "JSON lines, but it holds CSV"),
        ("in.jsonl", b"PAR1....PAR1", "JSON lines, but it holds Parquet"),
        ("in", b"PK\x03\x04....", "JSON lines, but it holds a zip archive"),
        ("in.parquet", b'{"prompt": "x"}\n', "Parquet, but it holds no Parquet"),
        ("in.jsonl.gz", b'{"prompt": "x"}\n', "gzip, but it holds no gzip"),
        ("in.jsonl.gz", b"", "gzip, but it holds nothing"),
        ("in.jsonl.gz", gzipped(gzipped(b"{}")), "JSON lines, but it holds gzip"),
        ("in.csv.gz", gzipped(b'{"prompt": "x"}\n'), "CSV, but it holds JSON lines"),
        ("in.jsonl.zst", gzipped(b"{}"), "Zstandard, but it holds gzip"),
        ("in.parquet.gz", gzipped(b"PAR1"), "decompress the file"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(
    name: str, data: bytes, match: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=rf"cannot read input .*{name}: .*{match}"):
        rows_of(written(tmp_path / name, data))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".csv.gz", ".csv.zst"])
def test_a_compressed_file_that_is_cut_off_is_refused(suffix: str, tmp_path: Path) -> None:
    text = "prompt\n" + "".join(f"prompt {i * 7919}\n" for i in range(1000))
    if "jsonl" in suffix:
        text = "".join(f'{{"prompt": "{i * 7919}"}}\n' for i in range(1000))
    whole = gzipped(text.encode()) if suffix.endswith(".gz") else zstd(text.encode())
    for data in (whole[:-9], whole[: len(whole) // 2], whole[:12]):
        with pytest.raises(InputError, match=rf"cannot read input .*in\{suffix}"):
            rows_of(written(tmp_path / f"in{suffix}", data))
    assert len(rows_of(written(tmp_path / f"in{suffix}", whole))) == 1000


def test_frames_and_members_one_after_the_other_are_one_file(tmp_path: Path) -> None:
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    parts = [f'{{"prompt": "{i}"}}\n'.encode() for i in range(3)]
    for name, pack in (("in.jsonl.zst", zstd), ("in.jsonl.gz", gzipped)):
        data = b"".join(map(pack, parts))
        found = rows_of(written(tmp_path / name, (skippable if pack is zstd else b"") + data))
        assert [row.text for row in found if isinstance(row, Row)] == ["0", "1", "2"]


def test_a_row_without_end_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmpq.jobs.file_format.MAX_LINE_BYTES", 10_000)
    quoted = b'prompt\n"' + b"line\n" * 10_000
    for data in (quoted, b"prompt\n" + b"x" * 50_000, b"prompt\n" + b'"a\n",' * 9000):
        for name, pack in (("in.csv", bytes), ("in.csv.zst", zstd), ("in.csv.gz", gzipped)):
            path = written(tmp_path / name, pack(data))
            with pytest.raises(InputError, match=r"line 2 has more than 10000 bytes; is a quote"):
                list(csv_rows(path, "" if name == "in.csv" else path.suffix))  # type: ignore[arg-type]
    bomb = b'{"prompt": "' + b"x" * 10**6 + b'"}\n{"prompt": "fine"}\n'
    for name, pack in (("in.jsonl.zst", zstd), ("in.jsonl.gz", gzipped)):
        long, fine = rows_of(written(tmp_path / name, pack(bomb)))
        assert isinstance(long, BadRow)
        assert "more than 10000 bytes" in long.error
        assert isinstance(fine, Row)


def test_folders_and_globs_take_every_format(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "x"}).encode() + b"\n"
    table = b"prompt\nx\n"
    for name, data in {
        "a.jsonl.zst": zstd(line), "b.ndjson.zst": zstd(line), "c.ndjson.gz": gzipped(line),
        "d.csv": table, "e.csv.gz": gzipped(table), "f.CSV.ZST": zstd(table),
        "notes.txt": b"", "g.csv.bz2": b"",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(data)
    assert len(read_rows(tmp_path)) == 6
    assert len(read_rows(f"{tmp_path}/[de].csv*")) == 2


def test_the_planner_reads_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--model", "opt-125m", "--device-names", "T4", "--device-numbers", "1", "--s", "8"]
    command += ["--n", "4", "-o", str(tmp_path / "plan.json"), "--input"]
    source = written(tmp_path / "in.csv.zst", zstd(b"prompt\nx\ny\nz\n"))
    assert plan_cli.main([*command, str(source)]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["workload"]["global_batch"] == 3
    capsys.readouterr()
    write_prompts(tmp_path / "in.csv", *prompts(2))
    assert plan_cli.main([*command, str(tmp_path / "in.csv")]) == 2
    assert "stands for CSV, but it holds JSON lines" in capsys.readouterr().err
