"""Rows per second and memory of a job's input, ledger and output, without a model.

Each size runs in a process of its own, so that its peak memory is its own.
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

from actors.messages import Sampling
from benchmarks.machine import processor_name
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import Job
from llmpq.jobs.manifest import JobIdentity
from llmpq.jobs.output import JobOutput
from llmpq.results import Result
from llmpq.rows import BadRow, Row

SIZES = (100_000, 1_000_000)
PROMPT, ANSWER = "word " * 40, tuple(range(100))  # 200 characters in, 100 tokens out
IDENTITY = JobIdentity("0123456789ab", "none", Sampling(max_new_tokens=100))


def answers(rows: Iterable[Row | BadRow]) -> Iterator[Result]:
    """An engine that answers at once."""
    for row in rows:
        yield Result(row.custom_id, "an answer " * 40, ANSWER, "length")


def measure(count: int, folder: Path) -> dict[str, float]:
    """Seconds of each part of a job over `count` rows, and this process's peak memory."""
    source = folder / "prompts.jsonl"
    with source.open("w") as file:
        for i in range(count):
            file.write(json.dumps({"prompt": f"{i} {PROMPT}"}) + "\n")
    before_mib = peak_mib()
    times = [time.perf_counter()]
    with JobOutput(folder / "out.jsonl") as output:
        job = Job(JobInput.find([source]), output, IDENTITY)
        times.append(time.perf_counter())
        for result in answers(job.todo()):
            job.write(result)
        times.append(time.perf_counter())
        job.finish()
    times.append(time.perf_counter())
    with JobOutput(folder / "out.jsonl") as output:
        again = Job(JobInput.find([source]), output, IDENTITY)
    times.append(time.perf_counter())
    if again.tally.resumed != count:
        raise AssertionError(f"{again.tally.resumed} of {count} rows are done")
    parts = ("check", "run", "join", "resume")
    seconds = {
        part: after - before for part, before, after in zip(parts, times, times[1:], strict=False)
    }
    return seconds | {"before_mib": before_mib, "peak_mib": peak_mib()}


def peak_mib() -> float:
    """Of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print a table."""
    if len(sys.argv) == 3:
        print(json.dumps(measure(int(sys.argv[1]), Path(sys.argv[2]))))
        return
    print(f"{processor_name()}\n")
    print("| rows | check | take in, write | join | all, rows/s | resume | memory before | peak |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for count in [int(size) for size in sys.argv[1:]] or SIZES:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.job_io", str(count), folder]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        seconds = [found[part] for part in ("check", "run", "join")]
        shown = " | ".join(f"{value:.1f} s" for value in seconds)
        print(
            f"| {count:,} | {shown} | {count / sum(seconds):,.0f} | {found['resume']:.1f} s "
            f"| {found['before_mib']:.0f} MiB | {found['peak_mib']:.0f} MiB |"
        )


if __name__ == "__main__":
    main()
