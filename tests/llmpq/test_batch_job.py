"""`examples/batch_job.py` through `ray job submit`, on a head started with `ray start --head`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RAY = str(Path(sysconfig.get_path("scripts")) / "ray")
PROMPTS = 10


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cluster token of this test's own, as the README has every node share one."""
    token = tmp_path_factory.mktemp("token") / "auth_token"
    token.write_text("0123456789abcdef" * 4)
    return os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}


@pytest.fixture(scope="module")
def head(environment: dict[str, str]) -> Iterator[str]:
    """Dashboard address of a head node, which is ended by its own process id."""
    dashboard = free_port()
    command = [RAY, "start", "--head", "--block", "--num-cpus=2", f"--port={free_port()}"]
    command += ["--include-dashboard=true", f"--dashboard-port={dashboard}"]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(f"http://127.0.0.1:{dashboard}/api/version", process)
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def wait_for(url: str, process: subprocess.Popen[bytes], timeout_s: float = 90.0) -> None:
    """Until something answers at `url`, be it that a token is missing."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            process_ended_within(process, 0.5)
    pytest.fail(f"no dashboard at {url}")


def process_ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def test_a_submitted_job_plans_runs_and_reports(
    head: str, environment: dict[str, str], tmp_path: Path
) -> None:
    lines = (ROOT / "examples" / "demo_prompts.jsonl").read_text().splitlines()[:PROMPTS]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text("\n".join([*lines, "{broken"]) + "\n")
    job = [sys.executable, "examples/batch_job.py", "--model", "examples/demo_model"]
    job += ["--cluster", "cluster_specs/demo_mixed_cpu.yaml", "--n", "8"]
    job += ["--input", str(prompts), "--output", str(output)]
    done = subprocess.run(
        [RAY, "job", "submit", "--address", head, "--working-dir", str(ROOT), "--", *job],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    log = done.stdout + done.stderr
    assert "exit code 3" in log, log
    assert "tokens/s" in log
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(results) == PROMPTS + 1
    errors = [r for r in results if r["error"]]
    assert [r["custom_id"] for r in errors] == [f"line-{PROMPTS + 1}"]
    assert all(r["token_ids"] and r["text"] is not None for r in results if not r["error"])
