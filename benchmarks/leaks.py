"""What many runs leave behind: processes, shared memory, open files, threads.

    python -m benchmarks.leaks [--runs 50]

Runs of the demo model on three stages in one local Ray, left in turn at the end, in the middle of
the results, and by an exception. Exits with 1 where anything grew from the first runs to the last.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from itertools import islice
from pathlib import Path

from benchmarks.machine import process_tree, processor_name

MODEL = Path("examples/demo_model")
SETTLE_S = 60.0
WARM_UP_RUNS = 3  # Ray starts helpers of its own when they are first needed
IDLE_WORKER = "ray::IDLE"


@dataclass(frozen=True)
class Held:
    """`processes` below this one (Ray's idle workers, which it keeps for the next actor, not
    counted), files and MiB in shared memory, this process's open files and Python threads, and the
    placement groups that Ray lists.
    """

    processes: int
    shared_files: int
    shared_mib: int
    open_files: int
    placement_groups: int
    threads: int


def held() -> Held:
    """What is held now."""
    import ray

    shared = [path for path in Path("/dev/shm").iterdir() if path.is_file()]
    groups = ray.util.placement_group_table().values()
    return Held(
        processes=_busy_processes(os.getpid()),
        shared_files=len(shared),
        shared_mib=sum(path.stat().st_blocks for path in shared) // 2048,
        open_files=len(os.listdir("/proc/self/fd")),
        placement_groups=sum(group["state"] != "REMOVED" for group in groups),
        threads=threading.active_count(),
    )


def _busy_processes(root: int) -> int:
    return sum(not _is_idle(pid) for pid in process_tree(root)) - 1


def _is_idle(pid: int) -> bool:
    """Whether it is a worker that waits for the next actor, or has ended."""
    try:
        return IDLE_WORKER in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return True


def settled(is_enough: Callable[[Held], bool]) -> Held:
    """What is held once `is_enough` of it, or after a while."""
    deadline = time.monotonic() + SETTLE_S
    while not is_enough(now := held()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return now


class _LeftEarlyError(Exception):
    pass


def run_once(plan: object, number: int) -> None:
    """One run, left in one of three ways."""
    from llmpq import Plan

    assert isinstance(plan, Plan)
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


def main() -> int:
    """Print what is held after the first runs and after the last one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=50)
    runs = parser.parse_args().runs
    from llmpq import Cluster, Workload
    from llmpq.session import ray_session

    cluster = Cluster.from_yaml("cluster_specs/demo_mixed_cpu.yaml")
    plan = cluster.plan(MODEL, Workload(8, 16, 24), keep_all_devices=True)
    print(f"{processor_name()}, {len(plan.stages)} stages\n")
    print("| runs |", " | ".join(f.name.replace("_", " ") for f in fields(Held)), "|")
    print("|--:|" + "--:|" * len(fields(Held)))
    with ray_session("local"):
        first = last = held()
        began = time.perf_counter()
        for number in range(runs + WARM_UP_RUNS):
            run_once(plan, number)
            if number == WARM_UP_RUNS - 1:
                first = settled(lambda now: not now.placement_groups)
                print("|", WARM_UP_RUNS, "|", " | ".join(map(str, astuple(first))), "|", flush=True)
        seconds = time.perf_counter() - began

        def is_no_more(now: Held) -> bool:
            return all(a <= b for a, b in zip(astuple(now), astuple(first), strict=True))

        last = settled(is_no_more)
        row = " | ".join(map(str, astuple(last)))
        print("|", runs + WARM_UP_RUNS, "|", row, "|")
        print(f"\n{seconds / (runs + WARM_UP_RUNS):.1f} s a run")
        return 0 if is_no_more(last) else 1


if __name__ == "__main__":
    sys.exit(main())
