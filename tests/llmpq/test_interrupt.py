"""Ctrl-C or SIGTERM in the middle of a run: what is finished is kept, no process stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from llmpq import Cluster, Workload

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "demo_model"


def children_of(root: int) -> set[int]:
    """Process ids below `root`, from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return found - {root}
        found |= more


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


def test_an_interrupt_keeps_results_and_frees_everything(tmp_path: Path) -> None:
    """SIGTERM does the same; `test_batch_job` stops a job by it."""
    plan_file, prompts = tmp_path / "plan.json", tmp_path / "prompts.jsonl"
    cluster = Cluster.from_yaml(ROOT / "cluster_specs" / "demo_mixed_cpu.yaml")
    cluster.plan(MODEL, Workload(8, 16, 200)).save(plan_file)
    rows = [
        {"custom_id": f"q{i}", "prompt": [5 + i] * 8, "max_new_tokens": 2 + 198 * (i % 2)}
        for i in range(200)
    ]
    prompts.write_text("".join(json.dumps(row | {"ignore_eos": True}) + "\n" for row in rows))
    output = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "llmpq.cli.dist", "--plan", str(plan_file)]
    process = subprocess.Popen(
        [*command, "--input", str(prompts), "--output", str(output), "--shard-rows", "1"],
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("results.jsonl.job/part-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert b"what was finished is kept" in error
    assert b"Traceback" not in error
    assert not output.exists()
    kept = list(tmp_path.glob("results.jsonl.job/part-*-1-*.jsonl"))
    assert 0 < len(kept) < len(rows)
    assert started
    while alive(started):
        assert time.monotonic() < deadline
        time.sleep(0.05)
