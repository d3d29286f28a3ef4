"""A run that is interrupted, killed or loses its Ray: what is finished is kept, nothing stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmpq import Cluster, Workload
from tests.llmpq.processes import children_of, name_of, wait_until_gone
from tests.llmpq.secret_words import HF_SECRET, RAY_SECRET, with_secrets
from tests.paths import ROOT

MODEL = ROOT / "examples" / "demo_model"
ONE_DEVICE = """
name: one
nodes: [{name: a, accelerators: {T4: 1}}]
network: {internode_gbit_per_s: 100}
emulate: {time_scale: 0}
"""
ROWS = 200
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command without its output; every other row is a long one."""
    folder = tmp_path_factory.mktemp("job")
    plan_file, prompts = folder / "plan.json", folder / "prompts.jsonl"
    (folder / "cluster.yaml").write_text(ONE_DEVICE)
    cluster = Cluster.from_yaml(folder / "cluster.yaml")
    plan = cluster.plan(MODEL, Workload(8, 16, 200))
    plan.save(plan_file)
    plan.report(folder / "report.html")
    rows = [
        {"custom_id": f"q{i}", "prompt": [5 + i] * 8, "max_new_tokens": 2 + 198 * (i % 2)}
        for i in range(ROWS)
    ]
    lines = ['{"prompt": 1}', *(json.dumps(row | {"ignore_eos": True}) for row in rows)]
    prompts.write_text("\n".join(lines))
    command = [sys.executable, "-m", "llmpq.cli.run", "--plan", str(plan_file)]
    return [*command, "--input", str(prompts), "--shard-rows", "1"]


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Of a short name: Ray keeps sockets in it."""
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as name:
        yield Path(name)


@contextmanager
def running(
    job: list[str], folder: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The job once it has committed something."""
    process = subprocess.Popen(
        [*job, "--output", str(folder / "results.jsonl")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    deadline = time.monotonic() + LIMIT_S
    try:
        while not kept_in(folder):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def kept_in(folder: Path) -> list[Path]:
    return list(folder.glob("results.jsonl.job/part-*-1-*.jsonl"))


def test_an_interrupt_keeps_results_and_frees_everything(
    job: list[str], tmp_path: Path, ray_folder: Path
) -> None:
    """SIGTERM does the same; `test_batch_job` stops a job by it. No secret is in what is left:
    plan, results, manifest, journal, cache, what is printed, and Ray's own logs.
    """
    job = [*job, "--show-plan"]
    environment = with_secrets(tmp_path) | {"RAY_TMPDIR": str(ray_folder)}
    with running(job, tmp_path, environment) as process:
        started = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        told, error = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, error
    assert b"what was finished is kept" in error
    assert b"Traceback" not in error
    assert not (tmp_path / "results.jsonl").exists()
    assert 0 < len(kept_in(tmp_path)) < ROWS
    wait_until_gone(started)
    planned = Path(job[job.index("--plan") + 1]).parent
    left = [path for folder in (tmp_path, ray_folder, planned) for path in files_below(folder)]
    names = {path.name for path in left}
    assert {"plan.json", "report.html", "job.json", "job.journal"} <= names
    assert any(path.suffix == ".log" for path in left), "Ray's logs are elsewhere"
    for content in (told, error, *(path.read_bytes() for path in left)):
        assert not [secret for secret in (HF_SECRET, RAY_SECRET) if secret.encode() in content]


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


@pytest.mark.rare
@pytest.mark.parametrize(
    ("victim", "named"),
    [
        ("raylet", "raylet"),
        ("gcs_server", "control service (GCS)"),
    ],
)
def test_a_local_run_that_loses_its_ray_says_so_and_ends(
    job: list[str],
    tmp_path: Path,
    victim: str,
    named: str,
) -> None:
    with running(job, tmp_path) as process:
        started = children_of(process.pid)
        (lost,) = (pid for pid in started if name_of(pid) == victim)
        os.kill(lost, signal.SIGKILL)
        told, error = process.communicate(timeout=50)  # Ray ends a process without GCS after 60 s
    rows = len(kept_in(tmp_path))
    message = (
        f"llmpq-dist: failed: Ray's {named} (process {lost}) has ended with signal 9; the Ray of a "
        f"local run does not come back, so this run cannot go on; {rows} rows are committed in "
        f"{tmp_path}/results.jsonl.job; the same command goes on from there\n"
    )
    assert (process.returncode, told) == (1, b"")
    assert error.decode().endswith(message), error
    assert b"Traceback" not in error
    assert b"terminated" not in error, "Ray's own words"
    assert 0 < rows < ROWS
    assert not (tmp_path / "results.jsonl.job" / "lock").exists()
    wait_until_gone(started)
