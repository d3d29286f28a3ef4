"""Seconds of a job's input and output at URLs beside those of local files, without a model.

Stores are on this machine, so that what is measured is the work and not the network: fsspec's local
files, Python's web server (which knows no ranges), and with s3fs and moto[server] a server of S3's
protocol, which is far slower than a real one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from benchmarks.lab import header, processor_name, table_row
from benchmarks.speed.job_io import answers, write_plan, write_prompts
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import OpenJob, open_output
from llmpq.jobs.result_lines import OutputOptions
from llmpq.jobs.store import JobIdentity

ROWS = 50_000


def seconds_of(source: str, target: str, identity: JobIdentity) -> list[float]:
    """Of checking the rows, of taking them in and writing results, and of joining and uploading."""
    times = [time.perf_counter()]
    with open_output(target, OutputOptions(), ()) as output:
        job = OpenJob(JobInput.find([source]), output, identity)
        times.append(time.perf_counter())
        for result in answers(job.todo()):
            job.write(result)
        times.append(time.perf_counter())
        job.finish()
    times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


@contextmanager
def server(command: Sequence[str]) -> Iterator[str]:
    """The address of a server that `command` starts when a port is added to it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = subprocess.Popen(
        [sys.executable, "-m", *command, str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(300):
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        started.terminate()
        started.wait()


@contextmanager
def bucket(prompts: Path) -> Iterator[str]:
    with server(["moto.server", "-p"]) as address:
        os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ |= {"AWS_ACCESS_KEY_ID": "here", "AWS_SECRET_ACCESS_KEY": "here"}
        import fsspec

        fs = fsspec.filesystem("s3")
        fs.mkdir("bucket")
        fs.put_file(str(prompts), "bucket/prompts.jsonl")
        yield "s3://bucket"


def lines(folder: Path, rows: int) -> Iterator[str]:
    prompts, identity = folder / "prompts.jsonl", write_plan(folder / "plan.json")
    write_prompts(prompts, rows, bad=False)
    yield f"{processor_name()}; {rows:,} rows, {prompts.stat().st_size / 1e6:.0f} MB of prompts\n"
    yield header("input | output | check | take in, write | join, upload | rows a second")

    def line(source: str, target: str) -> str:
        seconds = seconds_of(source, target, identity)
        shown = [f"{each:.1f} s" for each in seconds]
        names = [each.replace(str(folder), "") for each in (source, target)]
        return table_row([*names, *shown, f"{rows / sum(seconds):,.0f}"])

    here, there = str(folder), f"file://{folder}/there"
    yield line(f"{here}/prompts.jsonl", f"{here}/out.jsonl")
    yield line(f"{here}/prompts.jsonl", f"{here}/out/")
    yield line(f"file://{here}/prompts.jsonl", f"{there}/out.jsonl")
    yield line(f"file://{here}/prompts.jsonl", f"{there}/out/")
    with server(["http.server", "-d", here, "-b", "127.0.0.1"]) as address:
        yield line(f"{address}/prompts.jsonl", f"{here}/of-http.jsonl")
    if find_spec("s3fs") and find_spec("moto"):
        with bucket(prompts) as address:
            yield line(f"{address}/prompts.jsonl", f"{address}/out.jsonl")
            yield line(f"{address}/prompts.jsonl", f"{address}/out/")


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"
        for line in lines(Path(folder), rows):
            print(line, flush=True)


if __name__ == "__main__":
    main()
