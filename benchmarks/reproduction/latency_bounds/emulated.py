"""Schedules on emulated mixed clusters: requests a second and latencies as run and as planned.

    python -m benchmarks.reproduction.latency_bounds emulated [--requests 500] [--time_scale 1]

Two clusters of unlike GPUs (T4 and A100; P100 and V100) are planned for task S of ExeGPT (normal
lengths, its table 3) under a bound on latency, by each kind of schedule, and run by `Plan.run` as a
user would. Every stage is an actor that computes a tiny model and holds its results until the
planned device would have them, as do transfers. Outputs have exactly the lengths that were drawn.

Throughput is the slope of results over time while the stages are full: after twice as many results
as requests are in flight, and before the last ones that nobody follows. Latencies are those that
the run's own summary has, of all requests, from the beginning of their prefill.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.lab import processor_name
from benchmarks.reproduction.emulation import VOCABULARY, write_stand_in
from llmpq import Cluster, InfeasibleError, LengthDistribution, Plan, RequestLengths, Sampling
from planner.cluster.spec import ClusterSpec
from planner.scheduling import SCHEDULE_KINDS, ScheduleKind

FIRST_TOKEN = 3
"""Tokens before it have a meaning of their own."""

HEAD = (
    "| case | kind | planned req/s | run | ratio | bound s | planned p99 s | run | kept |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Measured:
    """Results a second while stages are full, and the latency at the plan's quantile."""

    requests_per_s: float
    latency_s: float
    errors: int


def rows(
    lengths: RequestLengths, vocabulary: int, count: int, seed: int = 0
) -> list[dict[str, object]]:
    """So many requests with lengths in their proportions, in random order: else a few hundred have
    other means than the distributions, by some percent.
    """
    generator = np.random.default_rng(seed)
    prompts, outputs = (
        [each.quantile(share) for share in generator.permutation((np.arange(count) + 0.5) / count)]
        for each in (lengths.prompts, lengths.outputs)
    )
    span = vocabulary - FIRST_TOKEN
    return [
        {
            "custom_id": str(i),
            "prompt": [FIRST_TOKEN + (i + k) % span for k in range(prompt)],
            "max_new_tokens": output,
        }
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def measure(plan: Plan, requests: list[dict[str, object]]) -> Measured:
    """Run the requests; raises SystemExit where some have no result."""
    ended_s: list[float] = []
    with plan.run(requests, sampling=Sampling(ignore_eos=True), replan="never") as results:
        for _ in results:
            ended_s.append(time.perf_counter())
        summary = results.summary
    if summary is None or summary.latency is None or len(ended_s) != len(requests):
        raise SystemExit(f"{len(ended_s)} of {len(requests)} requests ended")
    schedule = plan.spec.policy.followed_schedule
    in_flight = schedule.most_in_flight
    window = slice(min(2 * in_flight, len(ended_s) // 3), len(ended_s) - in_flight)
    return Measured(slope(ended_s, window), summary.latency.quantile_s, summary.errors)


def slope(ended_s: Sequence[float], window: slice) -> float:
    """Results a second by the least squares of their number over time in a window of them."""
    chosen = ended_s[window]
    if len(chosen) < 2:
        raise SystemExit("too few requests for a steady state; give more --requests")
    return float(np.polyfit(chosen, np.arange(len(chosen)), 1)[0])


def line(name: str, plan: Plan, found: Measured, time_scale: float = 1.0) -> str:
    """A row of the table, in seconds of the devices."""
    forecast, kind = plan.spec.latency, plan.spec.policy.followed_schedule.kind
    assert forecast is not None
    rate, latency_s = found.requests_per_s * time_scale, found.latency_s / time_scale
    ratio = rate / forecast.requests_per_s
    kept = "yes" if latency_s <= forecast.bound_s else "**no**"
    return (
        f"| {name} | {kind} | {forecast.requests_per_s:.3f} | {rate:.3f} | {ratio:.3f} "
        f"| {forecast.bound_s:.3g} | {forecast.latency_s:.2f} | {latency_s:.2f} | {kept} |"
    )


LENGTHS = RequestLengths(
    LengthDistribution.truncated_normal(256, 252, 512),
    LengthDistribution.truncated_normal(32, 13, 80),
)
"""Task S, summarization."""

MODEL = "opt-30b"
POSITIONS = 1024


@dataclass(frozen=True)
class Case:
    """Nodes of GPUs by name, and the bound on latency."""

    name: str
    nodes: tuple[tuple[str, int], ...]
    bound_s: float


CASES = (
    Case("2 T4, A100", (("T4", 2), ("A100-SXM4-40GB", 1)), 30.0),
    Case("2 P100, V100", (("P100-PCIE-16GB", 2), ("V100-SXM2-32GB", 1)), 60.0),
)


def cluster_of(case: Case, time_scale: float, stand_in: Path) -> Cluster:
    """The emulated cluster of a case, a node for each kind."""
    return Cluster(
        ClusterSpec.from_dict(
            {
                "name": case.name,
                "nodes": [
                    {"name": name.lower(), "accelerators": {name: count}}
                    for name, count in case.nodes
                ],
                "network": {"internode_gbit_per_s": 25},
                "emulate": {"time_scale": time_scale, "stand_in": str(stand_in)},
            }
        )
    )


def planned(
    case: Case, kind: ScheduleKind, cluster: Cluster, bound_s: float
) -> Plan | InfeasibleError:
    """The plan of one kind within the bound, or why there is none."""
    try:
        return cluster.plan(MODEL, LENGTHS, max_request_latency_s=bound_s, schedule=kind)
    except InfeasibleError as error:
        return error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how much is run."""
    parser.add_argument("--requests", type=int, default=500, help="of each run")
    parser.add_argument("--time_scale", type=float, default=1.0, help="seconds for one of a device")
    parser.add_argument("--kinds", nargs="+", choices=SCHEDULE_KINDS, default=["rra", "waa-c"])
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(len(CASES))))


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    print(f"{MODEL}, task S, {options.requests} requests each; {processor_name()}", flush=True)
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_stand_in(Path(folder), POSITIONS)
        for case in (CASES[i] for i in options.cases):
            cluster = cluster_of(case, options.time_scale, Path(folder))
            for kind in options.kinds:
                plan = planned(case, kind, cluster, case.bound_s)
                if isinstance(plan, InfeasibleError):
                    print(f"| {case.name} | {kind} | {plan} |", flush=True)
                    continue
                found = measure(plan, rows(LENGTHS, VOCABULARY, options.requests))
                print(line(case.name, plan, found, options.time_scale), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run this part alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser)
    run(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
