"""Kills the driver of a local run or a process of its Ray, and reports what ends and what stays.

    python -m benchmarks.stress.local_head [--kill driver raylet gcs stage]

`llmpq run` runs the demo model on three stages in a Ray of its own. Once rows are committed, one
process is killed (SIGKILL). Told are the seconds until the driver ends, its exit code and last
words, how long each other process lives on, what is left in shared memory (of anybody: run it on a
quiet machine) and in `/tmp/ray`, and whether the same command then finishes the job. Exits with 1
where a process or shared memory stays, or a row is lost or doubled.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import ray  # noqa: F401  (brings psutil)

# isort: split
import psutil

from benchmarks.lab import processor_name
from llmpq import Cluster, Workload

MODEL = "examples/demo_model"
CLUSTER = "cluster_specs/demo_mixed_cpu.yaml"
KINDS = ("driver", "raylet", "gcs", "stage")
COMMANDS = {"raylet": "raylet", "gcs": "gcs_server", "stage": "ray::StageActor"}
ROWS = 48
STARTS_S = 120.0
LIVES_ON_S = 400.0
LOOK_S = 0.05


def lives(process: psutil.Process) -> bool:
    """Whether the process is there and has not ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def name_of(process: psutil.Process) -> str:
    """The name that a process gives itself, or the script that it runs."""
    words = process.cmdline()
    scripts = [Path(word).name for word in words if word.endswith(".py")]
    return [*scripts, Path(words[0]).name.partition(".")[0]][0]


class Job:
    """`llmpq run` over `ROWS` rows, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "results.jsonl"
        self._log = folder / "log"
        plan, prompts = folder / "plan.json", folder / "prompts.jsonl"
        Cluster.from_yaml(CLUSTER).plan(MODEL, Workload(8, 16, 200), keep_all_devices=True).save(
            plan
        )
        rows = [{"custom_id": f"q{i}", "prompt": [5 + i % 90] * 8} for i in range(ROWS)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._command = [sys.executable, "-m", "llmpq.cli.run", "--plan", str(plan)]
        self._command += ["--input", str(prompts), "--output", str(self.output)]
        self._command += ["--shard-rows", "1", "--ignore-eos", "--no-cache"]

    def start(self) -> subprocess.Popen[bytes]:
        """Begin, or go on."""
        with self._log.open("wb") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log)

    def committed(self) -> int:
        """Rows on disk, of one a shard."""
        return len(list(self.output.parent.glob("results.jsonl.job/part-*.jsonl")))

    def last_words(self) -> str:
        """The last lines of the driver, without its progress."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n    ".join(line for line in lines if line.strip())[-1500:]

    def amiss(self) -> list[str]:
        """Describe what is wrong with the finished output."""
        seen = Counter(json.loads(line)["custom_id"] for line in self.output.open())
        return [f"q{i} is there {seen[f'q{i}']} times" for i in range(ROWS) if seen[f"q{i}"] != 1]


def try_kind(kind: str) -> list[str]:
    """Print what happens; returns what is amiss."""
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name))
        driver = job.start()
        began = time.monotonic()
        while job.committed() < ROWS // 10:
            if driver.poll() is not None or time.monotonic() - began > STARTS_S:
                raise SystemExit(f"the driver did not come so far: {job.last_words()}")
            time.sleep(LOOK_S)
        names = {p: name_of(p) for p in psutil.Process(driver.pid).children(recursive=True)}
        victim = driver.pid
        if kind in COMMANDS:
            victim = next(p.pid for p, name in names.items() if name == COMMANDS[kind])
        os.kill(victim, signal.SIGKILL)
        print(f"## SIGKILL of {kind} at {job.committed()} of {ROWS} rows\n", flush=True)
        left = _watch(driver, names, job)
        new_shared = sorted(set(os.listdir("/dev/shm")) - shared)
        print(f"shared memory left: {new_shared}")
        began = time.monotonic()
        code = job.start().wait()
        print(f"the same command: {code} after {time.monotonic() - began:.1f} s\n", flush=True)
        amiss = job.amiss() if code == 0 else [f"it ended with {code}: {job.last_words()}"]
    return amiss + left + new_shared


def _watch(
    driver: subprocess.Popen[bytes], names: dict[psutil.Process, str], job: Job
) -> list[str]:
    """Print who ends when, until all have; who has not."""
    began = time.monotonic()
    living, driver_lives = dict(names), True
    while (living or driver_lives) and time.monotonic() - began < LIVES_ON_S:
        seconds = time.monotonic() - began
        if driver_lives and driver.poll() is not None:
            driver_lives = False
            print(f"{seconds:7.1f} s driver, exit code {driver.returncode}")
            print(f"    {job.committed()} rows; {job.last_words()}")
        for gone in [process for process in living if not lives(process)]:
            print(f"{seconds:7.1f} s {living.pop(gone)}", flush=True)
        time.sleep(LOOK_S)
    if driver_lives:
        driver.kill()
        driver.wait()
    return [f"{name} ({p.pid}) lives after {LIVES_ON_S:g} s" for p, name in living.items()]


def main() -> int:
    """0 when nothing stays behind and no row is lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kill", nargs="+", choices=KINDS, default=KINDS)
    kinds = parser.parse_args().kill
    print(f"{processor_name()}\n")
    amiss = [line for kind in kinds for line in try_kind(kind)]
    print("\n".join(amiss))
    return 1 if amiss else 0


if __name__ == "__main__":
    sys.exit(main())
