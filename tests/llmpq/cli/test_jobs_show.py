"""`llmpq jobs`: what it prints and writes, what it refuses, and what it leaves alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmpq.cli import jobs
from llmpq.jobs.overview.overview import JobOverview, overview_of
from llmpq.jobs.overview.places import JobPlace
from llmpq.remote.ray_jobs import KnownJob, RayJobs
from tests.llmpq.fake_jobs import prompts, run_job, write_prompts
from tests.llmpq.made_journals import BEGAN, START, ended, session, write_journal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job that is done and one that was killed."""
    source = write_prompts(tmp_path / "in.jsonl", *prompts(40))
    run_job(source, tmp_path / "done.jsonl")
    write_journal(tmp_path / "done.jsonl.job", [*session(), ended(BEGAN + 30)])
    (tmp_path / "sub").mkdir()
    run_job(source, tmp_path / "sub" / "half.csv", limit=20)
    entries = session(rows=20)
    entries[0] = replace(START, rows=40)
    write_journal(tmp_path / "sub" / "half.csv.job", entries)
    return tmp_path


def test_show_prints_and_writes_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder / "page.html"
    assert jobs.main(["show", str(folder / "done.jsonl"), "--html", str(page)]) == 0
    told = capsys.readouterr()
    assert "40 of 40 done, 0 errors" in told.out
    assert f"page: {page}" in told.err
    assert "40 of 40 done, 0 errors" in page.read_text()


def test_a_job_that_was_killed_says_how_it_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jobs.main(["show", str(folder / "sub" / "half.csv"), "--watch"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "half.csv: stopped" in out
    assert "20 of 40 done, 20 left" in out
    assert "killed or its machine went down; the same command goes on" in out
    assert START.command in out


def test_watching_ends_with_the_job(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, waited = folder / "page.html", list[float]()
    found = iter(["running", "running", "done"])

    def look(place: JobPlace) -> JobOverview:
        return replace(overview_of(place), state=next(found))  # type: ignore[arg-type]

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        assert 'http-equiv="refresh" content="3"' in page.read_text()

    monkeypatch.setattr("llmpq.jobs.overview.overview.overview_of", look)
    monkeypatch.setattr(jobs, "time", SimpleNamespace(sleep=sleep))
    output = str(folder / "done.jsonl")
    assert jobs.main(["show", output, "--html", str(page), "--watch", "3"]) == 0
    assert waited == [3, 3]
    assert "http-equiv" not in page.read_text()
    assert capsys.readouterr().out.count("40 of 40 done") == 3


def test_figures_for_scripts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.main(["show", str(folder / "done.jsonl"), "--json"]) == 0
    job = json.loads(capsys.readouterr().out)
    assert (job["state"], job["rows"], job["tokens"], job["tokens_per_s"]) == ("done", 40, 800, 40)
    assert job["sessions"][0]["parts"][0]["plan"]["fingerprint"] == START.plan.fingerprint
    assert jobs.main(["list", str(folder), "--json"]) == 0
    assert sorted(each["state"] for each in json.loads(capsys.readouterr().out)) == [
        "done",
        "stopped",
    ]


def test_list(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "foreign").mkdir()
    (folder / "foreign" / "job.json").write_text("{}")
    (folder / "bad.jsonl.job").mkdir()
    (folder / "bad.jsonl.job" / "job.json").write_text("{")
    assert jobs.main(["list"]) == 0
    told = capsys.readouterr()
    lines = {words[0]: words for words in map(str.split, told.out.splitlines()) if words}
    assert lines["done.jsonl"][1:4] == ["done", "40/40", "0"]
    assert lines["sub/half.csv"][1:4] == ["stopped", "20/40", "0"]
    assert "the same command" in told.err
    assert "bad.jsonl.job/job.json cannot be read" in told.err
    assert "foreign" not in told.out + told.err
    assert jobs.main(["list", "sub", "."]) == 0
    assert capsys.readouterr().out.count("half.csv") == 1
    (folder / "empty").mkdir()
    assert jobs.main(["list", "empty"]) == 0
    assert "no jobs in empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["show", "none.jsonl"], "there is no output none.jsonl"),
        (["show", "in.jsonl"], "in.jsonl is no output of a job"),
        (["show", "sub"], "folder sub is no output of a job"),
        (["show", "done.jsonl", "--html", "none/page.html"], "cannot write the page to none"),
        (["show", "done.jsonl", "--html", "sub"], "cannot write the page to sub"),
        (["show", "done.jsonl", "--html", "done.jsonl"], "lies where the job writes"),
        (["show", "done.jsonl", "--html", "done.jsonl.job/p.html"], "lies where the job writes"),
        (["list", "none"], "none is no folder"),
        (["list", "--ray", "here"], "wants the address of the cluster's dashboard"),
    ],
)
def test_bad_input(
    folder: Path,
    arguments: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert jobs.main(arguments) == 2
    assert problem in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["show"],
        ["show", "x", "--watch", "0"],
        ["list", "--depth", "-1"],
        ["list", "a", "--ray", "u"],
    ],
)
def test_options_that_make_no_sense(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        jobs.main(arguments)
    assert left.value.code == 2


def test_neither_torch_nor_ray_nor_the_planner_is_loaded(folder: Path) -> None:
    text = (
        "import sys; from llmpq.cli import jobs; code = jobs.main(sys.argv[1:]); "
        "sys.exit(code or bool({'torch', 'ray', 'planner.search'} & set(sys.modules)) * 9)"
    )
    page = str(folder / "page.html")
    command = [sys.executable, "-c", text, "show", str(folder / "done.jsonl"), "--html", page]
    assert subprocess.run(command, check=False).returncode == 0


def details(**changes: Any) -> SimpleNamespace:
    """A job as Ray's client gives it."""
    return SimpleNamespace(
        **{
            "submission_id": "raysubmit_1",
            "job_id": None,
            "status": SimpleNamespace(value="RUNNING"),
            "start_time": BEGAN * 1e3,
            "end_time": None,
            "driver_exit_code": None,
            "entrypoint": "exec llmpq-dist --plan plan.json --output '/shared/o 1.jsonl'",
            "runtime_env": {"env_vars": {"LLMPQ_SUBMITTED": "1"}},
            **changes,
        }
    )


def test_jobs_of_a_ray_cluster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [
        details(),
        details(submission_id="other", entrypoint="python train.py", runtime_env=None),
        details(
            submission_id="raysubmit_2",
            entrypoint="/venv/bin/llmpq run --output '/half",
            runtime_env={},
            status=SimpleNamespace(value="FAILED"),
            start_time=(BEGAN + 9) * 1e3,
            end_time=(BEGAN + 10) * 1e3,
            driver_exit_code=3,
        ),
    ]

    def connect(self: RayJobs, address: str, option: str) -> None:
        self.address = address
        self._client: Any = SimpleNamespace(list_jobs=lambda: known)

    monkeypatch.setattr(RayJobs, "__init__", connect)
    found = RayJobs("http://head:8265", "--ray").known()
    assert [job.id for job in found] == ["raysubmit_2", "raysubmit_1"]
    assert found[1] == KnownJob(
        "raysubmit_1", "RUNNING", BEGAN, None, None, "/shared/o 1.jsonl", known[0].entrypoint
    )
    assert jobs.main(["list", "--ray", "http://head:8265"]) == 0
    told = capsys.readouterr()
    assert "FAILED (3)" in told.out
    assert "raysubmit_1" in told.out
    assert "--follow_job ID" in told.err
    assert jobs.main(["list", "--ray", "http://head:8265", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["status"] == "RUNNING"
    known.clear()
    assert jobs.main(["list", "--ray", "http://head:8265"]) == 0
    assert "knows no jobs of llmpq" in capsys.readouterr().err
