"""Times the list of many jobs, as `llmpq jobs serve` makes it for a browser.

    python -m benchmarks.stress.many_jobs [--jobs 1000] [--points 300]

Makes so many jobs, of which every third has stopped, whose journals have so many points each, and
looks at all of them: the first time, and again when nothing has changed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.lab import header, processor_name
from llmpq.jobs.overview.folder import JobFolder
from llmpq.jobs.overview.live import jobs_page
from tests.llmpq.fake_jobs import prompts, run_job, write_prompts
from tests.llmpq.made_journals import BEGAN, ended, session, write_journal


def make_jobs(top: Path, jobs: int, points: int) -> int:
    """Make the jobs, and return the bytes of one's journal."""
    source = write_prompts(top / "in.jsonl", *prompts(100))
    size = 0
    for number in range(jobs):
        folder = top / f"group{number % 7}"
        folder.mkdir(exist_ok=True)
        stopped = number % 3 == 0
        run_job(source, folder / f"out{number}.jsonl", limit=80 if stopped else None)
        last = ended(BEGAN + points + 20, "failed" if stopped else "done")
        entries = [*session(rows=80 if stopped else 100, seconds=points), last]
        path = write_journal(folder / f"out{number}.jsonl.job", entries)
        size = path.stat().st_size
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--points", type=int, default=300)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        size = make_jobs(Path(name), options.jobs, options.points)
        print(f"{options.jobs} jobs, {size / 1024:.0f} KiB of journal each; {processor_name()}\n")
        print(header("look | seconds | page, ms | page, KiB"))
        folder = JobFolder(name, 4, confined=True)
        for look in ("first", "second", "third"):
            began_s = time.perf_counter()
            jobs = folder.look()
            looked_s = time.perf_counter()
            page = jobs_page(jobs, name)
            made_s = time.perf_counter() - looked_s
            took = f"{looked_s - began_s:.2f} | {1000 * made_s:.0f} | {len(page) / 1024:.0f}"
            print(f"| {look} | {took} |")


if __name__ == "__main__":
    main()
