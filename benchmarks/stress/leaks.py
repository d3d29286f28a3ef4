"""Counts what many runs leave behind: processes, shared memory, open files, threads.

    python -m benchmarks.stress.leaks [--runs 50] [--starts 9]

First, runs of the demo model in one local Ray, left in turn at the end, in the middle of the
results, and by an exception. Exits with 1 where anything grew from the first runs to the last.
Then runs that start and leave a Ray each, and beside them, each in a process of its own, a bare
`ray.init` and `ray.shutdown`: what these leave is Ray's. Exits with 1 where a run leaves more.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import ray

from benchmarks.lab import header

# isort: split
import psutil  # Ray has just put it on the path

from benchmarks.lab import processor_name
from llmpq import Cluster, Plan, Workload
from llmpq.remote.session import ray_session

T = TypeVar("T")

MODEL = Path("examples/demo_model")
SETTLE_S = 60.0
WARM_UP_RUNS = 3  # Ray starts helpers of its own when they are first needed
IDLE_WORKER = "ray::IDLE"


@dataclass(frozen=True)
class Held:
    """`processes` below this one (Ray's idle workers, which it keeps for the next actor, not
    counted), files and MiB in shared memory, this process's open files and, of them, sockets, its
    threads (`python_threads`: those that Python knows), and the placement groups that Ray lists.
    """

    processes: int
    shared_files: int
    shared_mib: int
    open_files: int
    sockets: int
    threads: int
    python_threads: int
    placement_groups: int

    def more_than(self, other: Held) -> dict[str, int]:
        """By how much each figure has grown since `other`."""
        both = zip(fields(self), astuple(self), astuple(other), strict=True)
        return {field.name: now - then for field, now, then in both if now > then}


def held() -> Held:
    """Count what is held now."""
    shared = [path for path in Path("/dev/shm").iterdir() if path.is_file()]
    me = psutil.Process()
    below = [process for process in me.children(recursive=True) if not _is_idle(process)]
    groups = ray.util.placement_group_table().values() if ray.is_initialized() else ()
    return Held(
        processes=len(below),
        shared_files=len(shared),
        shared_mib=sum(path.stat().st_blocks for path in shared) // 2048,
        open_files=me.num_fds(),
        sockets=sum("socket:" in _target(path) for path in Path("/proc/self/fd").iterdir()),
        threads=me.num_threads(),
        python_threads=threading.active_count(),
        placement_groups=sum(group["state"] != "REMOVED" for group in groups),
    )


def _target(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # that of the listing itself
        return ""


def _is_idle(process: psutil.Process) -> bool:
    try:
        return IDLE_WORKER in process.cmdline()[:1]
    except (psutil.Error, IndexError):
        return True


def settled(is_enough: Callable[[Held], bool]) -> Held:
    """Count what is held once `is_enough` says so, or after a while."""
    deadline = time.monotonic() + SETTLE_S
    while not is_enough(now := held()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return now


class _LeftEarlyError(Exception):
    pass


def run_once(plan: Plan, number: int) -> None:
    """One run, left in one of three ways."""
    prompts = [[5 + i] * 8 for i in range(24)]
    try:
        with plan.run(prompts, no_cache=True) as results:
            if number % 3 == 0:
                found = len(list(results))
                if found != len(prompts):
                    raise SystemExit(f"{found} results of {len(prompts)}")
                return
            list(islice(results, 5))
            if number % 3 == 1:
                raise _LeftEarlyError
    except _LeftEarlyError:
        pass


def in_one_ray(plan: Plan, runs: int) -> int:
    """Runs in a local Ray; 0 where nothing grew."""
    with ray_session("local"):
        for number in range(WARM_UP_RUNS):
            run_once(plan, number)
        first = settled(lambda now: not now.placement_groups)
        print(_row("in one Ray", WARM_UP_RUNS, first), flush=True)
        for number in range(runs):
            run_once(plan, number)
        last = settled(lambda now: not now.more_than(first))
        print(_row("in one Ray", WARM_UP_RUNS + runs, last), flush=True)
        return 1 if last.more_than(first) else 0


def each_in_its_own(what: str, once: Callable[[int], None], starts: int) -> dict[str, int]:
    """Count what `starts` calls of `once`, which starts and leaves a Ray, add to the first ones."""
    for number in range(WARM_UP_RUNS):
        once(number)
    first = settled(lambda now: not now.processes)
    print(_row(what, WARM_UP_RUNS, first), flush=True)
    for number in range(starts):
        once(number)
    last = settled(lambda now: not now.processes)
    print(_row(what, WARM_UP_RUNS + starts, last), flush=True)
    return last.more_than(first)


def bare(number: int) -> None:
    """Start Ray as a local run does, and leave it."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.shutdown()


def _row(what: str, runs: int, now: Held) -> str:
    return f"| {what} | {runs} | {' | '.join(map(str, astuple(now)))} |"


def _apart(work: Callable[..., T], *arguments: Any) -> T:
    """Return what `work` returns in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def _runs_of_their_own(starts: int) -> dict[str, int]:
    plan = demo_plan()
    return each_in_its_own("a Ray each", partial(run_once, plan), starts)


def _bare_starts(starts: int) -> dict[str, int]:
    return each_in_its_own("bare Ray", bare, starts)


def demo_plan() -> Plan:
    """The demo model on all devices of the demo cluster."""
    cluster = Cluster.from_yaml("cluster_specs/demo_mixed_cpu.yaml")
    return cluster.plan(MODEL, Workload(8, 16, 24), keep_all_devices=True)


def main() -> int:
    """Print what is held after the first runs and after the last one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=50, help="in one Ray")
    parser.add_argument("--starts", type=int, default=9, help="of a Ray of their own")
    options = parser.parse_args()
    names = [field.name.replace("_", " ") for field in fields(Held)]
    print(f"{processor_name()}, Ray {ray.__version__}\n")
    print(header(f"| runs | {' | '.join(names)}"), flush=True)
    failed = _apart(in_one_ray, demo_plan(), options.runs)
    mine = _apart(_runs_of_their_own, options.starts)
    rays = _apart(_bare_starts, options.starts)
    print(f"\n{options.starts} more runs leave {mine or 'nothing'}, as many bare ones {rays or 0}")
    starts = options.starts
    # Whole ones a start: the last helper thread may come a moment later
    worse = [name for name, more in mine.items() if more // starts > rays.get(name, 0) // starts]
    return 1 if failed or worse else 0


if __name__ == "__main__":
    sys.exit(main())
