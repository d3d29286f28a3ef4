"""The output of a job is what its name says, and goes on from a finished one of each format."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
from collections.abc import Iterable
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from llmpq import Plan
from llmpq.cli import run as run_cli
from llmpq.jobs.file_format import SUFFIXES
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import JobOptions, OpenJob, open_output
from llmpq.jobs.job_files import shards_in
from llmpq.jobs.job_output import JobOutput
from llmpq.jobs.result_files import ResultFiles
from llmpq.jobs.result_lines import result_identities
from llmpq.jobs.row_database import RowDatabase, Tally
from llmpq.jobs.text_files import RESULT_COLUMNS, csv_lines, read_csv_results
from llmpq.rows.results import Result
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import (
    EXTEND,
    IDENTITY,
    OVERWRITE,
    SMALL_SHARDS,
    QuickDisk,
    prompts,
    results_in,
    run_job,
    write_prompts,
)

pytestmark = pytest.mark.usefixtures("no_waiting")

ODD = ('a "quoted", text', "line\nends\r\nand\rreturns", "=1+1", "  spaces  ", "\x00 nul", "é 漢字")
ROWS: list[Any] = [
    *prompts(3),
    *({"custom_id": f"o{i}", "prompt": text[::-1]} for i, text in enumerate(ODD)),
    {"custom_id": "e", "prompt": "bad"},
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "in.jsonl", *ROWS)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_each_format_is_written_and_gone_on_with(suffix: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / f"out{suffix}"
    write_prompts(source, *ROWS[:-3])
    run_job(source, target, limit=3)
    assert not target.exists()
    assert run_job(source, target).resumed == 3
    write_prompts(source, *ROWS)
    added = run_job(source, target, job_options=EXTEND)
    assert (added.resumed, added.left) == (len(ROWS) - 3, 3)
    found = results_in(target)
    assert len(found) == len(ROWS)
    assert [found[f"o{i}"]["text"] for i in range(len(ODD))] == list(ODD)
    assert found["o2"]["token_ids"] == list(b"=1+1")
    assert found["e"]["error"] == "failed"
    assert run_job(source, target) == Tally(len(ROWS), len(ROWS), 1, 0)
    retry = JobOptions(retry_errors=True)
    assert run_job(source, target, job_options=retry).left == 1
    assert results_in(target) == found
    assert run_job(source, target, OVERWRITE).left == len(ROWS)
    assert results_in(target) == found


def test_names_in_capitals_are_the_same(source: Path, tmp_path: Path) -> None:
    run_job(source, tmp_path / "OUT.CSV.GZ")
    text = gzip.decompress((tmp_path / "OUT.CSV.GZ").read_bytes()).decode()
    assert next(csv.reader(io.StringIO(text, ""))) == list(RESULT_COLUMNS)
    (tmp_path / "in").mkdir()
    write_prompts(tmp_path / "in" / "A.JSONL", *prompts(2))
    assert len(list(JobInput.find([tmp_path / "in"]).rows())) == 2


@pytest.mark.parametrize(
    "name", ["o.json", "o.txt", "o.xlsx", "o.tsv", "o.gz", "o.json.gz", "o.parquet.zst", "o.7b"]
)
def test_other_endings_are_refused_with_what_is_written(
    name: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"does not write; .*\.jsonl, .*\.csv .*\.gz or \.zst.*/"):
        run_job(source, tmp_path / name)
    assert list(tmp_path.iterdir()) == [source]


def test_the_command_refuses_them_too(
    plan: Plan, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.save(tmp_path / "plan.json")
    command = ["--plan", str(tmp_path / "plan.json"), "--input", str(source), "--output"]
    assert run_cli.main([*command, str(tmp_path / "out.xlsx")]) == 2
    assert "ends in '.xlsx', which llmpq does not write" in capsys.readouterr().err
    submit = ["--submit", "http://127.0.0.1:1", "--input", "/in.jsonl"]
    assert run_cli.main([*command[:2], *submit, "--output", "/out.txt"]) == 2
    assert "ends in '.txt'" in capsys.readouterr().err


def test_a_name_without_ending_a_pipe_and_a_folder_hold_json_lines(
    source: Path, tmp_path: Path
) -> None:
    run_job(source, tmp_path / "results")
    assert set(results_in(tmp_path / "results")) == {row["custom_id"] for row in ROWS}
    run_job(source, f"{tmp_path}/out.csv/")
    assert set(results_in(tmp_path / "out.csv")) == {row["custom_id"] for row in ROWS}
    os.mkfifo(tmp_path / "pipe.csv")
    reader = os.open(tmp_path / "pipe.csv", os.O_RDONLY | os.O_NONBLOCK)
    with open_output(str(tmp_path / "pipe.csv"), SMALL_SHARDS, ()) as output:
        job = OpenJob(JobInput.find([source]), output, IDENTITY)
        job.write(Result("q0", "text", (1,), "stop"))
        assert json.loads(os.read(reader, 1000))["text"] == "text"
    os.close(reader)


def test_a_link_to_another_format_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "latest.csv").symlink_to("results.jsonl")
    with pytest.raises(InputError, match=r"link to .*results\.jsonl, whose name stands for JSON"):
        run_job(source, tmp_path / "latest.csv")
    (tmp_path / "latest.jsonl").symlink_to("results.jsonl")
    run_job(source, tmp_path / "latest.jsonl")
    assert len(results_in(tmp_path / "results.jsonl")) == len(ROWS)


def test_formats_that_need_pyarrow_say_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for name, what in (("o.parquet", "Parquet files"), ("o.csv.zst", r"end in \.zst")):
        with pytest.raises(InputError, match=rf"{what} need pyarrow, .* 'llmpq\[parquet\]'"):
            run_job(source, tmp_path / name)
    write_prompts(tmp_path / "in.jsonl.zst", "{}")
    (tmp_path / "in.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(InputError, match=r"end in \.zst need pyarrow"):
        list(JobInput.find([tmp_path / "in.jsonl.zst"]).rows())


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".csv.gz", ".csv", ".parquet"])
def test_a_finished_file_that_is_damaged_or_another_format_is_refused(
    suffix: str, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / f"out{suffix}"
    run_job(source, target)
    whole = target.read_bytes()
    damaged = {"half": whole[: len(whole) // 2], "other": b'{"custom_id": "a"}\n', "none": b"{"}
    if suffix != ".csv":
        damaged["flipped"] = whole[:20] + bytes(255 - byte for byte in whole[20:60]) + whole[60:]
    for data in damaged.values():
        target.write_bytes(data)
        with pytest.raises(InputError, match=rf"out\{suffix}"):
            run_job(source, target)
        assert target.read_bytes() == data, "it stays"
    target.write_bytes(b'{"custom_id": "a"}\n')
    with pytest.raises(InputError, match=r"holds (JSON lines|no \w+); name it by .*--overwrite"):
        run_job(source, target)
    target.unlink()
    run_job(source, target)
    assert results_in(target).keys() == {row["custom_id"] for row in ROWS}


def test_csv_keeps_every_text_and_says_which_rows_failed(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"custom_id": f"c{i}", "text": text, "token_ids": [1, 2], "finish_reason": "stop"}
        for i, text in enumerate((*ODD, "", ",", '"', "\n", "\r", "x" * 200_000))
    ]
    rows = [row | {"error": None, "fingerprint": "f"} for row in rows]
    failed = {"custom_id": "e", "text": None, "token_ids": [], "finish_reason": None}
    rows += [failed | {"error": error, "fingerprint": "f"} for error in ("why", "")]
    path = tmp_path / "r.csv"
    path.write_bytes(b"".join(csv_lines(rows)))
    assert list(read_csv_results(path, "")) == rows
    with path.open(newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == [row["text"] or "" for row in rows]


def test_bytes_of_compressed_files_depend_on_the_rows_alone(tmp_path: Path) -> None:
    for suffix in (".jsonl.gz", ".jsonl.zst", ".csv.gz", ".csv.zst"):
        source = write_prompts(tmp_path / "in.jsonl", *prompts(50))
        run_job(source, tmp_path / f"a{suffix}")
        run_job(source, tmp_path / f"b{suffix}")
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


class Drained(QuickDisk):
    """Counts what is written, in which pieces."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def write(self, descriptor: int, data: Any) -> int:
        self.sizes.append(len(data))
        return super().write(descriptor, data)


@pytest.mark.parametrize(
    "suffix",
    [
        ".jsonl.gz",
        ".csv.zst",
        *(pytest.param(s, marks=pytest.mark.rare) for s in (".jsonl.zst", ".csv.gz")),
    ],
)
def test_files_are_written_and_read_in_pieces(suffix: str, tmp_path: Path) -> None:
    """20 MB of results, of which no piece is larger than a few hundred KB."""
    text = bytes(range(32, 127)).decode() * 20
    row = {"custom_id": "a", "text": text, "token_ids": [1], "finish_reason": "stop"}
    row |= {"error": None, "fingerprint": "0123456789ab-" + "0" * 20}
    target, database, files = tmp_path / f"out{suffix}", RowDatabase(), Drained()

    class Endless(ResultFiles):
        def _kept(self, lines: Iterable[bytes], source: int) -> Any:
            return repeat(json.dumps(row).encode() + b"\n", 10_000)

    with JobOutput(tmp_path / "one", SMALL_SHARDS) as output:
        OpenJob(
            JobInput.find([write_prompts(tmp_path / "in", *prompts(1))]), output, IDENTITY
        ).write(Result("q0", "x", (1,), "stop"))
        output.commit()
        Endless(target, False, tuple(shards_in(output.folder)), database).write(
            files, tmp_path / "aside"
        )
    assert max(files.sizes) < 2**18
    assert sum(1 for _ in result_identities(target)) == 10_000
