"""A job knows its rows: others are refused with what changed, or taken in when asked to."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmpq import Plan
from llmpq.cli import run as run_cli
from llmpq.jobs.job import JobOptions
from llmpq.jobs.row_database import RowDatabase, RowKind, Tally, WantedRow
from llmpq.run.checkpoint import job_identity
from llmpq.run.options import RunOptions
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import (
    EXTEND,
    OVERWRITE,
    RESUME,
    SMALL_SHARDS,
    prompts,
    results_in,
    run_job,
    write_prompts,
)

pytestmark = pytest.mark.usefixtures("no_waiting")

TARGETS = ["out.jsonl", "out.csv.gz", "out.parquet", "out/"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


def job_folder(target: str) -> Path:
    return Path(target) if target.endswith("/") else Path(f"{target}.job")


def manifest(target: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job_folder(target) / "job.json").read_text())
    return found


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("name", TARGETS)
def test_other_rows_are_refused_with_what_changed(
    name: str, limit: int | None, source: Path, tmp_path: Path
) -> None:
    """Finished or not: the same message, and nothing changes."""
    target = f"{tmp_path}/{name}"
    write_prompts(source, *prompts(7))
    run_job(source, target, limit=limit)
    rows: list[Any] = prompts(9)
    del rows[2]
    rows[5] = {"custom_id": "q6", "prompt": "another"}
    write_prompts(source, *rows)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    told = r"2 are new \('q7', 'q8'\), 1 of before is gone \('q2'\), 1 has another prompt or samp"
    for how in (SMALL_SHARDS, RESUME):
        with pytest.raises(InputError, match=rf"made from other rows than .*: {told}.* \('q6'\); "):
            run_job(source, target, how)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    if limit is None:
        with pytest.raises(InputError, match=r"give a row of another prompt another custom_id, na"):
            run_job(source, target, job_options=EXTEND)
        rows[5] = {"custom_id": "q6", "prompt": "prompt 6"}
        write_prompts(source, *rows)
    else:  # the other prompt has no result yet, which is in the way of none
        with pytest.raises(InputError, match=r"pass --extend to keep what is done and do the ot"):
            run_job(source, target)
    assert run_job(source, target, RESUME, job_options=EXTEND).rows == 8
    assert set(results_in(Path(target))) == {f"q{i}" for i in range(9)}, "q2 stays, as it was done"
    assert run_job(source, target) == Tally(8, 8, 0, 0), "now it is a job of these rows"
    write_prompts(source, *prompts(3, first=20))
    with pytest.raises(InputError, match=r"3 are new .*, 9 of before are gone \('q\d', 'q\d', 'q"):
        run_job(source, target)
    run_job(source, target, OVERWRITE)
    assert set(results_in(Path(target))) == {"q20", "q21", "q22"}
    left = {path.name.partition("-")[0] for path in job_folder(target).iterdir()}
    assert left <= {"job.json", "part"}


def test_rows_that_are_gone_undone_are_counted_and_cannot_be_named(
    source: Path, tmp_path: Path
) -> None:
    write_prompts(source, *prompts(6))
    run_job(source, tmp_path / "out.jsonl", limit=2)
    write_prompts(source, *prompts(4))
    with pytest.raises(InputError, match=r"input: 2 of before are gone; pass --extend"):
        run_job(source, tmp_path / "out.jsonl")
    run_job(source, tmp_path / "out.jsonl", job_options=EXTEND)
    assert len(results_in(tmp_path / "out.jsonl")) == 4


@pytest.mark.parametrize("limit", [None, 4])
def test_the_same_rows_in_other_files_are_the_same_job(limit: int | None, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    rows: list[Any] = [*prompts(5), {"prompt": "no id"}, {"prompt": "no id"}, {"prompt": "bad"}]
    rows += [{"custom_id": "h", "prompt": "hot", "temperature": 0.5}]
    run_job(write_prompts(tmp_path / "a.jsonl", *rows, "{"), target, limit=limit)
    random.Random(1).shuffle(rows)
    wide = [
        {name: row.get(name) for name in ("custom_id", "prompt", "temperature")} for row in rows
    ]
    run_job(write_prompts(tmp_path / "shuffled.jsonl", "{", *rows), target, limit=limit and 0)
    (tmp_path / "split").mkdir()
    write_prompts(tmp_path / "split" / "1.jsonl", *rows[:3])
    line = "".join(json.dumps(row) + "\n" for row in rows[3:6])
    (tmp_path / "split" / "2.ndjson.gz").write_bytes(gzip.compress(line.encode()))
    pq.write_table(pa.Table.from_pylist(wide[6:]), tmp_path / "split" / "3.parquet")
    run_job(tmp_path / "split", target, limit=limit and 0)
    cells = [",".join("" if each is None else str(each) for each in row.values()) for row in wide]
    (tmp_path / "p.csv").write_text("\n".join(["custom_id,prompt,temperature", *cells]))
    run_job(tmp_path / "p.csv", target)
    named = {name for name in results_in(target) if ":" not in name}
    assert len(named) == len(rows)


def test_rows_that_cannot_be_read_or_failed_may_be_mended_or_taken_out(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    write_prompts(source, *prompts(2), "{", {"custom_id": "m", "prompt": 1.5}, "[1]")
    run_job(source, target)
    source = source.rename(tmp_path / "renamed.jsonl")
    assert run_job(source, target).left == 2, "error rows are called by their places"
    write_prompts(source, *prompts(2), {"custom_id": "m", "prompt": "mended"})
    assert run_job(source, target).left == 1
    assert results_in(target)["m"]["text"] == "dednem"
    write_prompts(source, *prompts(3), {"custom_id": "m", "prompt": "bad"})
    with pytest.raises(InputError, match=r"1 is new \('q2'\), 1 has another prompt .* \('m'\)"):
        run_job(source, target)
    failing = write_prompts(tmp_path / "failing.jsonl", *prompts(2), {"prompt": "bad"})
    run_job(failing, tmp_path / "f.jsonl")
    assert run_job(write_prompts(failing, *prompts(2)), tmp_path / "f.jsonl") == Tally(2, 2, 0, 0)


def test_jobs_of_an_older_llmpq_go_on_and_get_a_digest(source: Path, tmp_path: Path) -> None:
    for name in TARGETS:
        target = f"{tmp_path}/{name}"
        for limit in (None, 3):
            write_prompts(source, *prompts(5))
            run_job(source, target, OVERWRITE, limit=limit)
            content = manifest(target)
            path = job_folder(target) / "job.json"
            del content["input_digest"]
            path.write_text(json.dumps(content))
            for each in job_folder(target).glob("rows-*"):
                each.unlink()
            write_prompts(source, *prompts(6))
            assert run_job(source, target).left == (1 if limit is None else 3)
            assert manifest(target)["input_digest"]
            with pytest.raises(InputError, match=r"1 is new \('q6'\)"):
                run_job(write_prompts(source, *prompts(7)), target)


def test_a_digest_that_is_none_and_a_list_that_is_damaged(source: Path, tmp_path: Path) -> None:
    target = f"{tmp_path}/out.jsonl"
    write_prompts(source, *prompts(5))
    run_job(source, target, limit=3)
    (listed,) = job_folder(target).glob("rows-*")
    assert listed.stat().st_size == 5 * 26
    assert listed.name == f"rows-{manifest(target)['input_digest']}"
    whole = listed.read_bytes()
    write_prompts(source, *prompts(6))
    for damage in (whole[:-1], whole[::-1], None):
        listed.unlink()
        if damage is not None:
            listed.write_bytes(damage)
        with pytest.raises(InputError, match=r"rows-\w+, which tells .* damaged or missing.*--ext"):
            run_job(source, target)
    assert run_job(source, target, job_options=EXTEND).left == 3
    content = manifest(target)
    for other in ("../../x", 5, ["a"]):
        content["input_digest"] = other
        (job_folder(target) / "job.json").write_text(json.dumps(content))
        assert run_job(source, target) == Tally(6, 6, 0, 0)
        assert len(manifest(target)["input_digest"]) == 32


def test_an_extension_that_is_stopped_goes_on_without_being_asked_again(
    source: Path, tmp_path: Path
) -> None:
    target = f"{tmp_path}/out.jsonl"
    run_job(write_prompts(source, *prompts(4)), target)
    write_prompts(source, *prompts(8))
    run_job(source, target, job_options=EXTEND, limit=2)
    assert run_job(source, target).left == 2
    assert run_job(source, target, job_options=EXTEND) == Tally(8, 8, 0, 0)
    retry = JobOptions(retry_errors=True)
    assert run_job(source, target, job_options=retry) == Tally(8, 8, 0, 0)


def test_long_ids_are_cut(source: Path, tmp_path: Path) -> None:
    run_job(write_prompts(source, *prompts(2)), tmp_path / "out.jsonl")
    write_prompts(source, *prompts(2), {"custom_id": "x" * 999, "prompt": "a"})
    with pytest.raises(InputError, match=r"1 is new \('x{80}'…\); pass"):
        run_job(source, tmp_path / "out.jsonl")


def test_nothing_is_asked_where_nothing_is_done(source: Path, tmp_path: Path) -> None:
    """The results have been removed: there is nothing to mix with."""
    target = tmp_path / "out.jsonl"
    run_job(write_prompts(source, *prompts(4)), target)
    target.unlink()
    assert run_job(write_prompts(source, *prompts(2, first=9)), target).left == 2
    assert run_job(write_prompts(source, {"prompt": "a"}), tmp_path / "b", job_options=EXTEND)


def test_the_digest_of_rows_does_not_depend_on_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llmpq.jobs.row_database.BATCH_ROWS", 7)
    rows = [WantedRow(f"id{i}", f"{0:012x}-{i:020x}", i, 1) for i in range(1, 50)]
    rows += [WantedRow("bad", f"{0:012x}-{9:020x}", 77, 0, RowKind.BAD)]

    def digest(rows: list[WantedRow]) -> str:
        database = RowDatabase()
        assert database.want_all(rows) is None
        return database.rows_digest()

    whole = digest(rows)
    shuffled = [row._replace(place=1000 - row.place) for row in rows[::-1]]
    nameless = WantedRow("f:3", "x", 2000, 0, RowKind.NAMELESS)
    assert digest([nameless, *shuffled]) == whole
    assert digest(rows[1:]) != whole
    assert digest([rows[0]._replace(fingerprint=f"{0:012x}-{99:020x}"), *rows[1:]]) != whole
    reworded = rows[-1]._replace(fingerprint=f"{0:012x}-{8:020x}")
    assert digest([*rows[:-1], reworded]) == whole, "another message is no other row"


def test_the_command_says_it_before_torch_and_ray(
    plan: Plan, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.save(tmp_path / "plan.json")
    target = tmp_path / "out.csv"
    identity = job_identity(plan.spec, RunOptions())
    run_job(write_prompts(source, *prompts(3)), target, identity=identity)
    write_prompts(source, *prompts(2))
    command = ["--plan", str(tmp_path / "plan.json"), "--input", str(source)]
    command += ["--output", str(target)]
    assert run_cli.main(command) == 2
    error = capsys.readouterr().err
    assert "1 of before is gone ('q2'); pass --extend to keep what is done" in error
    assert run_cli.main([*command, "--extend"]) == 0
    assert "all 2 rows are done" in capsys.readouterr().err
    assert run_cli.main(command) == 0
    assert len(results_in(target)) == 3


def test_other_rows_of_a_finished_file_alone_are_noticed(source: Path, tmp_path: Path) -> None:
    """A file that was copied without its job's folder still holds its rows."""
    run_job(write_prompts(source, *prompts(3)), tmp_path / "a.csv")
    copy = tmp_path / "b.csv"
    copy.write_bytes((tmp_path / "a.csv").read_bytes())
    assert run_job(source, copy) == Tally(3, 3, 0, 0)
    copy.with_name("b.csv.job").joinpath("job.json").unlink()
    with pytest.raises(
        InputError, match=r"3 are new .*, 3 of before are gone \('q0', 'q1', 'q2'\)"
    ):
        run_job(write_prompts(source, *prompts(3, first=5)), copy)
