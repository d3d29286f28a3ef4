"""Timelines of random schedules beside simulations of their events.

    python -m benchmarks.reproduction.latency_bounds timelines [--cases 200] [--requests 4000]

Half of the cases are schedules of RRA, half of WAA, on random pipelines of one to eight stages with
random lengths (`cases.py`). Printed are the shares of cases in which requests per second and the
99th percentile of latencies are within 5 % of the simulation, the median deviation and the worst,
and the CPU seconds of either.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.machine import processor_name
from benchmarks.reproduction.latency_bounds.cases import RraCase, WaaCase, random_rra, random_waa
from planner.latency_bound.rra_timeline import rra_timeline
from planner.latency_bound.simulate import ObservedRequests, Watch, simulate_rra
from planner.latency_bound.simulate_waa import simulate_waa
from planner.latency_bound.timeline import Timeline
from planner.latency_bound.waa_timeline import waa_timeline

QUANTILE, NEAR = 0.99, 0.05
SETTLING = 3
"""Times the requests in flight that begin before those which are observed."""


@dataclass(frozen=True)
class Deviation:
    """A timeline's requests per second and latency over the simulation's, less 1; and the CPU
    seconds of both.
    """

    requests_per_s: float
    latency: float
    timeline_s: float
    events_s: float


def of_rra(seed: int, requests: int) -> Deviation:
    """The deviation of a random schedule of RRA."""
    case: RraCase = random_rra(np.random.default_rng([1, seed]))
    parts = case.times, case.lengths, case.schedule
    watch = Watch(SETTLING * case.schedule.decode_requests, requests)
    return _deviation(
        lambda: rra_timeline(*parts, QUANTILE),
        lambda: simulate_rra(*parts, watch, np.random.default_rng(seed)),
    )


def of_waa(seed: int, requests: int) -> Deviation:
    """The deviation of a random schedule of WAA."""
    case: WaaCase = random_waa(np.random.default_rng([7, seed]))
    watch = Watch(SETTLING * case.schedule.decode_requests, requests)
    return _deviation(
        lambda: waa_timeline(case.sides, case.schedule, QUANTILE),
        lambda: simulate_waa(case.sides, case.schedule, watch, np.random.default_rng(seed)),
    )


def _deviation(
    timeline: Callable[[], Timeline], events: Callable[[], ObservedRequests]
) -> Deviation:
    began_s = time.process_time()
    found = timeline().performance
    between_s = time.process_time()
    seen = events()
    return Deviation(
        found.requests_per_s / seen.requests_per_s - 1,
        found.latency_s / seen.latency_s(QUANTILE) - 1,
        between_s - began_s,
        time.process_time() - between_s,
    )


def line(name: str, found: Sequence[Deviation]) -> str:
    """A row of the table."""
    cells = [name, str(len(found))]
    for values in ([each.requests_per_s for each in found], [each.latency for each in found]):
        off = np.array(values)
        near, median = np.mean(np.abs(off) <= NEAR), np.median(np.abs(off))
        cells += [f"{near:.0%}", f"{median:.1%}", f"{off.min():+.0%} to {off.max():+.0%}"]
    seconds = [np.mean([each.timeline_s for each in found]) * 1e3]
    seconds.append(np.mean([each.events_s for each in found]) * 1e3)
    return f"| {' | '.join([*cells, *(f'{each:.1f}' for each in seconds)])} |"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how many are tried."""
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--requests", type=int, default=4000, help="simulated of each")


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    print(f"{options.cases} cases, {options.requests} requests each; {processor_name()}")
    print(
        "| kind | cases | requests/s within 5 % | median | worst | latency within 5 % | median "
        "| worst | timeline ms | events ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for name, of in (("RRA", of_rra), ("WAA", of_waa)):
        cases = range(options.cases // 2)
        print(line(name, [of(seed, options.requests) for seed in cases]), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run this part alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser)
    run(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
