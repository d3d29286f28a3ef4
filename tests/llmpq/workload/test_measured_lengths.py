"""Files of measured lengths: tables, and outputs of jobs that are done or not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from llmpq.workload import measured_lengths
from llmpq.workload.measured_lengths import id_number, read_measured
from quant.common.errors import InputError, SpecError
from tests.llmpq.fake_jobs import prompts, run_job, write_prompts

HEADER = "prompt_tokens,output_tokens\n"


def test_a_table(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(f"{HEADER}512,100\n20,3\n")
    rows = read_measured(path).rows
    assert rows is not None
    assert (rows.prompt_tokens, rows.output_tokens) == ((512, 20), (100, 3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{HEADER}512,100\n20,many\n", r"l\.csv:3: output_tokens is 'many'; it must be a whole"),
        (f"{HEADER}-1,100\n", r"l\.csv:2: prompt_tokens is '-1'"),
        (f"{HEADER}1.5,100\n", r"l\.csv:2: prompt_tokens is '1.5'"),
        (f"{HEADER}9,0\n", r"l\.csv:2: output_tokens is '0'"),
        (f"{HEADER}99999999,1\n", r"l\.csv:2: prompt_tokens is '99999999'.* of 1 to 4194304"),
        (f"{HEADER}9\n", r"l\.csv:2: the row has not as many fields"),
        (HEADER, r"l\.csv: no rows; give one line"),
        ("", r"l\.csv:1: the columns are ''; they must be prompt_tokens,output_tokens"),
        ("prompt_tokens\n9\n", r"l\.csv:1: the columns are 'prompt_tokens'"),
        ("9,9\n", r"l\.csv:1: the columns are '9,9'"),
        ("\udcff\n", r"l\.csv cannot be read"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "l.csv"
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(SpecError, match=message):
        read_measured(path)


def expected(count: int) -> Mapping[str, int]:
    """Tokens of what `run_job` writes: as many as the prompt has characters."""
    return {each["custom_id"]: len(each["prompt"]) for each in prompts(count)}


@pytest.mark.parametrize(
    "name", ["r.jsonl", "r.csv", "r.parquet", "r.jsonl.gz", "r.csv.zst", "folder/"]
)
def test_results_of_a_job_that_is_done_or_not(tmp_path: Path, name: str) -> None:
    bad = [{"custom_id": "e", "prompt": "bad"}, {"custom_id": "f", "prompt": 3}]
    source = write_prompts(tmp_path / "in.jsonl", *bad, *prompts(20))
    target = f"{tmp_path}/{name}"
    run_job(source, target, limit=12)
    begun = read_measured(target)
    assert begun.outputs == expected(10)
    assert begun.done is not None
    names = ["e", "f", *expected(10)]
    assert sorted(begun.done.tolist()) == sorted(map(id_number, names)), "errors are done too"
    run_job(source, target)
    ended = read_measured(target)
    assert (ended.outputs, ended.done) == (expected(20), None)


def test_of_many_results_some_are_kept_whichever_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_lengths, "MOST_FINISHED", 50)
    source = write_prompts(tmp_path / "in.jsonl", *prompts(400))
    run_job(source, tmp_path / "a.jsonl")
    write_prompts(source, *reversed(prompts(400)))
    run_job(source, tmp_path / "b.jsonl")
    kept = read_measured(tmp_path / "a.jsonl").outputs
    assert kept is not None
    assert 20 <= len(kept) <= 50
    assert kept.items() <= expected(400).items()
    assert read_measured(tmp_path / "b.jsonl").outputs == kept


def test_what_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, content, message in (
        ("missing.jsonl", None, "no such file; give a CSV with the columns"),
        ("empty", None, "no folder of a job of llmpq run"),
        ("notes.md", "x", r"\.md is no ending of results"),
        ("in.jsonl", '{"prompt": "x"}\n', "row 1 is no result of llmpq"),
        ("torn.jsonl", "{\n", "row 1 is no result of llmpq"),
        ("none.jsonl", "", "no finished row without an error"),
        ("packed.jsonl.gz", "x", "its name stands for gzip"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(InputError, match=message):
            read_measured(tmp_path / name)
