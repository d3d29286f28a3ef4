"""Batches through Ray's Jobs API on a head with token authentication: both forms, every exit code,
stop and resume.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmpq import Cluster, Workload
from tests.llmpq.fake_jobs import results_in, write_prompts
from tests.llmpq.ray_head import RAY, TOKEN, Head, ray_head
from tests.paths import ROOT

MODEL = ROOT / "examples" / "demo_model"
ONE_DEVICE = """
name: one
nodes: [{name: a, accelerators: {T4: 1}}]
network: {internode_gbit_per_s: 100}
emulate: {time_scale: 0}
"""
PROMPTS = 10
LONG = 300
"""Rows of the job that is stopped; every second one is long, so that it lasts until then."""


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head() as started:
        yield started


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One emulated stage of the demo model; the plain form has the three of the demo."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    cluster = path.with_name("cluster.yaml")
    cluster.write_text(ONE_DEVICE)
    Cluster.from_yaml(cluster).plan(MODEL, Workload(8, 16, 200)).save(path)
    return str(path)


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=300)
    return process.returncode, out, error


@pytest.mark.rare  # `--submit` goes the same way below
def test_the_plain_form_plans_runs_and_reports(
    head: Head, tmp_path: Path, worker_environment: dict[str, str]
) -> None:
    lines = (ROOT / "examples" / "demo_prompts.jsonl").read_text().splitlines()[:PROMPTS]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text("\n".join([*lines, "{broken"]) + "\n")
    job = [sys.executable, "examples/batch_job.py", "--model", "examples/demo_model"]
    job += ["--cluster", "cluster_specs/demo_mixed_cpu.yaml", "--n", "8"]
    job += ["--input", str(prompts), "--output", str(output), "--run", "--shard-rows", "4"]
    submit = [RAY, "job", "submit", "--address", head.address, "--working-dir", str(ROOT)]
    done = subprocess.run(
        [*submit, "--runtime-env-json", json.dumps(worker_environment), "--", *job],
        env=head.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    log = done.stdout + done.stderr
    assert "exit code 3" in log, log
    assert "tokens/s" in log
    assert TOKEN not in log
    results = results_in(output)
    assert len(results) == PROMPTS + 1
    errors = [r for r in results.values() if r["error"]]
    assert [r["custom_id"] for r in errors] == [f"prompts.jsonl:{PROMPTS + 1}"]
    assert all(r["token_ids"] and r["text"] is not None for r in results.values() if not r["error"])


@pytest.mark.rare  # `test_interrupt.py` stops a run, `test_submit.py` a job that is made up
def test_stopped_while_it_runs_then_submitted_again(
    head: Head, plan_file: str, tmp_path: Path
) -> None:
    rows = [
        {"custom_id": f"q{i}", "prompt": [5 + i] * 8, "max_new_tokens": 2 + 98 * (i % 2)}
        for i in range(LONG)
    ]
    write_prompts(tmp_path / "in.jsonl", *rows)
    output = tmp_path / "out.jsonl"
    command = ["--plan", plan_file, "--input", os.path.relpath(tmp_path / "in.jsonl")]
    command += ["--output", str(output), "--ignore_eos", "--shard-rows", "1"]
    code, job_id, error = finished(head.command("--no-wait", *command))
    assert code == 0, error
    job_id = job_id.strip()
    follower = head.command("--follow-job", job_id)
    wait_until(lambda: job_id in logged(follower))
    follower.send_signal(signal.SIGINT)
    code, _, error = finished(follower)
    assert (code, "goes on" in error) == (130, True), error

    follower = head.command("--follow-job", job_id)
    wait_until(lambda: list(tmp_path.glob("out.jsonl.job/part-*")))
    code, _, error = finished(head.command("--stop-job", job_id))
    assert (code, "is stopped" in error) == (0, True), error
    code, log, error = finished(follower)
    assert (code, "was stopped" in error) == (143, True), error
    assert "what was finished is kept" in log
    kept = len(list(tmp_path.glob("out.jsonl.job/part-*-1-*.jsonl")))
    assert 0 < kept < LONG
    assert not output.exists()

    code, log, error = finished(head.command(*command))
    assert code == 0, log + error
    assert f"{kept} of {LONG} rows are done" in log
    results = results_in(output)
    assert {name: len(r["token_ids"]) for name, r in results.items()} == {
        str(row["custom_id"]): row["max_new_tokens"] for row in rows
    }
    assert TOKEN not in log + error
    assert not [p for p in files_of(head) if TOKEN.encode() in p.read_bytes()]


@pytest.mark.parametrize(
    ("rows", "wanted", "words"),
    [
        ([{"custom_id": "a", "prompt": [5] * 99}], 3, "1 row has errors"),
        pytest.param(
            [{"custom_id": "a", "prompt": [5]}] * 2,
            2,
            "stands in in.jsonl:1 already",
            marks=pytest.mark.rare,  # the code goes the same way
        ),
    ],
    ids=["error rows", "bad input"],
)
def test_bad_input_and_error_rows_have_their_exit_codes(
    rows: list[dict[str, Any]],
    wanted: int,
    words: str,
    head: Head,
    plan_file: str,
    tmp_path: Path,
) -> None:
    prompts, output = write_prompts(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    job = head.command("--plan", plan_file, "--input", str(prompts), "--output", str(output))
    code, log, _ = finished(job)
    assert (code, words in log) == (wanted, True), log
    if wanted == 3:
        assert results_in(output)["a"]["error"]
        (known,) = [job for job in listed(head) if job["output"] == str(output)]
        assert (known["status"], known["exit_code"]) == ("FAILED", 3)
        assert known["began_at"] <= known["ended_at"] <= time.time()


def listed(head: Head) -> list[dict[str, Any]]:
    """What `llmpq jobs list --ray` says of the head."""
    command = [
        sys.executable,
        "-m",
        "llmpq.cli.jobs",
        "list",
        "--json",
        "--ray",
        head.address,
    ]
    done = subprocess.run(
        command, env=head.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


TOLD = ("is not its own", "keeps one from being sent", "none was found")


def tokens(folder: Path) -> list[dict[str, str]]:
    """Variables by which a wrong token comes, none, and one from nowhere."""
    wrong = folder / "token"
    wrong.write_text(TOKEN[::-1])
    wrong.chmod(0o600)
    paths = ("RAY_AUTH_TOKEN_PATH", str(wrong)), ("RAY_AUTH_TOKEN_PATH", str(folder / "missing"))
    return [dict(paths[:1]), {"RAY_AUTH_MODE": "disabled"}, dict(paths[1:])]


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param((0,), id="wrong"),
        # `test_token.py` has the words, and other tests the right one.
        pytest.param((1, 2, 3), id="none and right", marks=pytest.mark.rare),
    ],
)
def test_without_its_token_the_head_is_closed(
    chosen: tuple[int, ...], head: Head, tmp_path: Path
) -> None:
    given = [*tokens(tmp_path), {}]
    told = [*TOLD, "knows no job any"]
    processes = [head.command("--follow-job", "any", **given[number]) for number in chosen]
    for process, words in zip(processes, [told[number] for number in chosen], strict=True):
        code, _, error = finished(process)
        assert (code, words in error, "Traceback" in error) == (2, True, False), error


@pytest.mark.rare  # `test_without_its_token_the_head_is_closed` holds the same of jobs
def test_without_its_token_no_run_joins_the_head(
    head: Head, plan_file: str, tmp_path: Path
) -> None:
    """Said at once, in one message; `ray.init` alone takes 20 s and a line each of them."""
    prompts = write_prompts(tmp_path / "in.jsonl", {"prompt": [5]})
    command = [sys.executable, "-m", "llmpq.cli.run", "--plan", plan_file]
    command += ["--input", str(prompts), "--address", head.cluster]
    processes = [
        subprocess.Popen(
            [*command, "--output", str(tmp_path / f"out-{number}.jsonl")],
            env=head.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, variables in enumerate(tokens(tmp_path))
    ]
    for process, words in zip(processes, TOLD, strict=True):
        code, out, error = finished(process)
        (told,) = [line for line in error.splitlines() if "error: " in line]
        assert code == 2
        assert words in told
        assert "RAY_AUTH_TOKEN_PATH" in told
        assert "gcs_client" not in error
        assert TOKEN[::-1] not in out + error


def files_of(head: Head) -> list[Path]:
    """What the head has written, but its token file: logs and the folders of jobs."""
    found = (Path(base, name) for base, _, names in os.walk(head.folder / "ray") for name in names)
    return [p for p in found if p.is_file() and not p.is_symlink()]


def logged(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
