"""Schedules on CPU stages that compute: requests a second and latencies as run and as planned.

    python -m benchmarks.latency_bounds real [--requests 400] [--budget_s 150]

A LLaMA of 168 million parameters, in bfloat16 where the CPU has units for it and else in float32,
on two stages of one thread each. `llmpq profile` measures the layers and the hops here first. Each
kind of schedule is planned by these times, within some multiples of the least latency that it has,
and run by `Plan.run` as a user would, where outputs have exactly the lengths that were drawn. What
is printed is as in `emulated`, and a fixed product's speed just before each run over that just
after the profile: plans know only how fast the machine was then.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.latency_bounds.runs import HEAD, line, measure, rows
from benchmarks.machine import native_dtype, pace_probe, processor_name
from benchmarks.throughput_cases import VOCABULARY, Case
from benchmarks.throughput_contestants import CLUSTER
from llmpq import (
    BoundNotMetError,
    Cluster,
    InfeasibleError,
    LengthDistribution,
    Plan,
    RequestLengths,
)
from llmpq.cli.measuring.profile import main as profile
from planner.scheduling import SCHEDULE_KINDS, ScheduleKind

LENGTHS = RequestLengths(
    LengthDistribution.truncated_normal(64, 32, 128),
    LengthDistribution.truncated_normal(24, 10, 48),
)
STAGES, THREADS = 2, 1
NO_SECONDS = 1e-6
"""A bound that nothing keeps, which is refused with the least one."""


def plans(
    folder: Path, profiles: Path, dtype: str, kind: ScheduleKind, multiples: Sequence[float]
) -> Iterator[Plan | InfeasibleError]:
    """Yield the plans of a kind within multiples of its least latency, or why there is none."""
    specification = folder.with_name("cpu.yaml")
    specification.write_text(CLUSTER.format(stages=STAGES, threads=THREADS))
    cluster = Cluster.from_yaml(specification)

    def planned(bound_s: float) -> Plan | InfeasibleError:
        try:
            return cluster.plan(
                folder,
                LENGTHS,
                max_request_latency_s=bound_s,
                schedule=kind,
                profiles=profiles,
                theta=0.0,
                bits=[16],
                dtype=dtype,
            )
        except InfeasibleError as error:
            return error

    too_tight = planned(NO_SECONDS)
    if isinstance(too_tight, BoundNotMetError):
        for multiple in multiples:
            yield planned(multiple * too_tight.reachable)
    else:
        yield too_tight


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how much is measured and run."""
    parser.add_argument("--requests", type=int, default=400, help="of each run")
    parser.add_argument("--budget_s", type=float, default=150, help="seconds of the profile")
    parser.add_argument("--multiples", type=float, nargs="+", default=[3.0, 6.0], help="bounds")
    parser.add_argument("--kinds", nargs="+", choices=SCHEDULE_KINDS, default=["rra", "waa-c"])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="of all computing")
    parser.add_argument("--tiny", action="store_true", help="a model to try the command with")


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    dtype = options.dtype or native_dtype()
    about = f"two CPU stages, {options.requests} requests each, {dtype}"
    print(f"{about}; {processor_name()}", flush=True)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        Case("llama", "equal", options.tiny).write_model(folder)
        profiles = measured_profiles(folder, dtype, options.budget_s)
        probe = pace_probe()
        profiled = probe().matmul_gflop_per_s
        print(HEAD, flush=True)
        for kind in options.kinds:
            for plan in plans(folder, profiles, dtype, kind, options.multiples):
                if isinstance(plan, InfeasibleError):
                    print(f"| two CPU stages | {kind} | {plan} |", flush=True)
                    continue
                pace = probe().matmul_gflop_per_s / profiled
                found = measure(plan, rows(LENGTHS, VOCABULARY, options.requests))
                print(f"{line('two CPU stages', plan, found)} {pace:.2f} of the pace |", flush=True)


def measured_profiles(folder: Path, dtype: str, budget_s: float) -> Path:
    """Measure the model's layers, hops and loading on a stage's threads; raises SystemExit if that
    fails.
    """
    target = folder.with_name("profiles.csv")
    chosen = ["--threads", str(THREADS), "--bits", "16", "--budget_s", str(budget_s)]
    chosen += ["--dtype", dtype]
    code = profile(["--model", str(folder), "--max_length", "192", *chosen, "-o", str(target)])
    if code:
        raise SystemExit(code)
    return target


def main(arguments: Sequence[str] | None = None) -> None:
    """Run this part alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser)
    run(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
