"""Processor time and memory of a job's input, database and output, without a model.

Rows that all run and rows that all are unreadable are measured; then the same job, looked up again
row by row, and as a command when nothing has changed since. Each measurement runs in a process of
its own, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.lab import processor_name
from llmpq import Cluster, Workload
from llmpq.cli.common import EXIT_DONE, EXIT_ERROR_ROWS
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import OpenJob
from llmpq.jobs.job_output import JobOutput
from llmpq.jobs.store import JobIdentity
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Row
from llmpq.run.checkpoint import job_identity
from llmpq.run.options import RunOptions

SIZES = (100_000, 1_000_000)
PROMPT, ANSWER = "word " * 40, tuple(range(100))  # 200 characters in, 100 tokens out
ROOT = Path(__file__).parents[2]


def answers(rows: Iterable[Row | BadRow]) -> Iterator[Result]:
    """An engine that answers at once."""
    for row in rows:
        if isinstance(row, BadRow):
            yield Result(row.custom_id, None, (), None, row.error)
        else:
            yield Result(row.custom_id, "an answer " * 40, ANSWER, "length")


def write_prompts(path: Path, count: int, bad: bool) -> None:
    """Prompts without ids; `bad` ones are whole numbers."""
    with path.open("w") as file:
        for i in range(count):
            file.write(json.dumps({"prompt": i if bad else f"{i} {PROMPT}"}) + "\n")


def measure(count: int, bad: bool, folder: Path) -> dict[str, float]:
    """Processor seconds of each part of a job over `count` rows, this process's peak memory, and
    the seconds of the whole command on the job that is done.
    """
    source, target = folder / "prompts.jsonl", folder / "out.jsonl"
    write_prompts(source, count, bad)
    identity = write_plan(folder / "plan.json")
    before_mib = peak_mib()
    times = [time.process_time()]
    with JobOutput(target) as output:
        job = OpenJob(JobInput.find([source]), output, identity)
        times.append(time.process_time())
        for result in answers(job.todo()):
            job.write(result)
        times.append(time.process_time())
        job.finish()
    times.append(time.process_time())
    with JobOutput(target) as output:
        again = OpenJob(JobInput.find([source]), output, identity)
    times.append(time.process_time())
    if again.tally.resumed != count:
        raise AssertionError(f"{again.tally.resumed} of {count} rows are done")
    parts = ("check", "run", "join", "resume")
    seconds = {
        part: after - before for part, before, after in zip(parts, times, times[1:], strict=False)
    }
    memory = {"before_mib": before_mib, "peak_mib": peak_mib()}
    return seconds | memory | {"command": command_s(folder, EXIT_ERROR_ROWS if bad else EXIT_DONE)}


def write_plan(path: Path) -> JobIdentity:
    """A plan of the demo model; what the rows of its jobs share."""
    cluster = Cluster.from_yaml(ROOT / "cluster_specs" / "demo_mixed_cpu.yaml")
    plan = cluster.plan(ROOT / "examples" / "demo_model", Workload(8, 16, 100))
    plan.save(path)
    return job_identity(plan.spec, RunOptions())


def command_s(folder: Path, code: int) -> float:
    """Seconds on the clock of `llmpq run` on the finished job, from its start to its end."""
    arguments = ["--plan", "plan.json", "--input", "prompts.jsonl", "--output", "out.jsonl"]
    began_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "llmpq.cli.run", *arguments],
        cwd=folder,
        capture_output=True,
        check=False,
    )
    if done.returncode != code:
        raise AssertionError(f"exit code {done.returncode}: {done.stderr.decode()}")
    return time.perf_counter() - began_s


def peak_mib() -> float:
    """The most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print a table."""
    if len(sys.argv) == 4:
        print(json.dumps(measure(int(sys.argv[1]), sys.argv[2] == "bad", Path(sys.argv[3]))))
        return
    print(f"{processor_name()}\n")
    print(
        "| rows | check | take in, write | join | rows a second | check again | memory before "
        "| peak | unchanged, command |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for count in [int(size) for size in sys.argv[1:]] or SIZES:
        for kind in ("good", "bad"):
            print(row_of(count, kind), flush=True)


def row_of(count: int, kind: str) -> str:
    """A line of the table, measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.speed.job_io", str(count), kind, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    seconds = [found[part] for part in ("check", "run", "join")]
    shown = " | ".join(f"{value:.1f} s" for value in seconds)
    return (
        f"| {count:,} {kind} | {shown} | {count / sum(seconds):,.0f} | {found['resume']:.1f} s "
        f"| {found['before_mib']:.0f} MiB | {found['peak_mib']:.0f} MiB "
        f"| {found['command']:.1f} s |"
    )


if __name__ == "__main__":
    main()
