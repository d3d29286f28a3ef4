"""`llmpq run` killed and started again: the results are those of a run that nothing disturbed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llmpq import Plan
from llmpq.cli import jobs
from llmpq.cli import run as run_cli
from tests.actors.models import random_prompts, reference, references
from tests.llmpq.conftest import NEW_TOKENS
from tests.llmpq.fake_jobs import results_in, write_prompts
from tests.llmpq.processes import AGENTS, children_of, name_of, wait_until_gone

ROWS = 240


def command(plan: Plan, folder: Path, *more: str) -> list[str]:
    plan.save(folder / "plan.json")
    arguments = ["--plan", str(folder / "plan.json"), "--input", str(folder / "in.jsonl")]
    return [*arguments, "--output", str(folder / "out.jsonl"), *more]


def test_killed_at_once_and_resumed(
    tiny: tuple[Path, Any],
    one_stage: Plan,
    tmp_path: Path,
    local_ray: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = random_prompts(tuple(1 + i % 16 for i in range(16)))
    rows = [{"custom_id": f"q{i}", "prompt": list(drawn[i % 16])} for i in range(ROWS)]
    write_prompts(tmp_path / "in.jsonl", *rows)
    arguments = command(one_stage, tmp_path, "--shard-rows", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "llmpq.cli.run", *arguments],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out.jsonl.job/part-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    started = {pid: name_of(pid) for pid in children_of(process.pid)}
    output = str(tmp_path / "out.jsonl")
    assert jobs.main(["show", output, "--json"]) == 0  # while it writes
    assert json.loads(capsys.readouterr().out)["state"] == "running"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert {"raylet", "gcs_server"} < set(started.values())
    wait_until_gone({pid for pid, name in started.items() if name not in AGENTS})
    kept = len(list(tmp_path.glob("out.jsonl.job/part-*.jsonl")))
    assert 0 < kept < ROWS
    assert jobs.main(["show", output]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "out.jsonl: stopped" in told
    assert f"{kept} of {ROWS} done, {ROWS - kept} left, 0 errors" in told
    assert "Its process was killed or its machine went down" in told
    assert run_cli.main([*arguments, "--resume"]) == 0
    assert f"{kept} of {ROWS} rows are done" in capsys.readouterr().err
    assert jobs.main(["show", output, "--json"]) == 0
    job = json.loads(capsys.readouterr().out)
    assert (job["state"], job["rows"], job["done"], job["errors"]) == ("done", ROWS, ROWS, 0)
    assert [session["how"] for session in job["sessions"]] == ["killed", "done"]
    assert job["sessions"][1]["rows"] == ROWS - kept
    assert job["sessions"][1]["tokens"] == sum(
        len(row["token_ids"]) for row in list(results_in(tmp_path / "out.jsonl").values())[kept:]
    )
    assert jobs.main(["list", str(tmp_path)]) == 0
    assert f"{ROWS}/{ROWS}" in capsys.readouterr().out
    found = results_in(tmp_path / "out.jsonl")
    expected = references(tiny[1], drawn, NEW_TOKENS)
    assert len(found) == ROWS
    for i in range(ROWS):
        assert found[f"q{i}"]["token_ids"] == expected[i % 16]
    check_a_job_that_is_done(arguments, tmp_path, capsys, monkeypatch)


def check_a_job_that_is_done(
    arguments: list[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same command says so without Ray; other rows and options are told apart."""

    def no_ray(*_: object) -> None:
        pytest.fail("Ray is started for a job that is done")

    monkeypatch.setattr("llmpq.remote.shared_stages.ray_session", no_ray)
    assert run_cli.main(arguments) == 0
    assert f"all {ROWS} rows are done" in capsys.readouterr().err
    with (folder / "in.jsonl").open("a") as file:
        file.write(json.dumps({"custom_id": "long", "prompt": [3] * 40}) + "\n")
    assert run_cli.main(arguments) == 2
    assert "1 is new ('long'); pass --extend" in capsys.readouterr().err
    assert run_cli.main([*arguments, "--on-error", "fail", "--extend"]) == 1
    assert "stopped at row 'long'" in capsys.readouterr().err
    assert run_cli.main([*arguments, "--extend"]) == 3
    assert run_cli.main(arguments) == 3
    assert run_cli.main([*arguments, "--temperature", "1"]) == 2
    assert "temperature 0.0, this job has 1.0" in capsys.readouterr().err
    assert run_cli.main([*arguments, "--shard-rows", "0"]) == 2


def test_streams_of_results(one_stage: Plan, tiny: tuple[Path, Any], local_ray: None) -> None:
    """Rows are taken in as they are needed; `async for`, context manager."""
    expected = reference(tiny[1], (5, 6, 7), NEW_TOKENS)
    with one_stage.run([5, 6, 7] for _ in range(9)) as results:
        first = next(results)
        assert list(first.token_ids) == expected
    assert next(results, None) is None

    async def collect() -> list[str]:
        async with one_stage.run(iter([[5, 6, 7], [5], "text"])) as results:
            return [result.custom_id async for result in results]

    assert sorted(asyncio.run(collect())) == ["row-0", "row-1", "row-2"]
