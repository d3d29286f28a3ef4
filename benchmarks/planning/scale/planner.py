"""Seconds, gap and memory of planning, as clusters of four kinds of GPUs grow.

One pipeline (`llmpq plan`) up to 32 GPUs, pipelines that share a job (`llmpq plan --replicas auto`)
up to 1,000. Each plan is made in a process of its own, whose peak of memory is what the system
counts. Seconds are CPU seconds of the whole plan, by which its limits of time count here too, so
that other work on the machine does not matter; Python's start is left out.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.lab import header, show
from benchmarks.planning.scale.fleets import grown_cluster
from planner.fleet.planning import FleetRequest, find_fleet
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.search.find import find_plan
from planner.workload import Job

ONE, MANY = (4, 8, 16, 24, 32), (8, 16, 24, 32, 64, 100, 200, 500, 1000)
PROMPTS_PER_DEVICE, PROMPT, OUTPUT = 200, 512, 100


@dataclass(frozen=True)
class Planned:
    """One plan: seconds that it took, peak of memory in bytes, gap, and what it promises."""

    devices: int
    is_fleet: bool
    seconds: float
    peak_bytes: int
    gap: float
    tokens_per_s: float
    pipelines: int
    unused: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what this part is told."""
    parser.add_argument("--model", default="opt-30b")
    parser.add_argument("--update", type=Path, help="page whose tables are replaced")
    parser.add_argument("--plot", type=Path, help="picture to draw (SVG)")
    parser.add_argument("--one", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    """Print the table of all sizes, or as a process of its own the figures of one."""
    if options.one is not None:
        kind, devices = options.one.split(":")
        print(json.dumps(asdict(planned(int(devices), kind == "fleet", options.model))))
        return
    sizes = [("plan", each) for each in ONE] + [("fleet", each) for each in MANY]
    points = [_in_a_process(kind, devices, options.model) for kind, devices in sizes]
    show(table(points), options.update, "planner")
    if options.plot is not None:
        plot(points, options.plot)


def planned(devices: int, is_fleet: bool, model: str) -> Planned:
    """Plan `model` on a cluster of so many devices."""
    cluster, shape = grown_cluster(devices), model_shape(model)
    job, options = Job.of(PROMPTS_PER_DEVICE * devices, PROMPT, OUTPUT), PlanOptions()
    began = time.process_time()
    if is_fleet:
        fleet = find_fleet(FleetRequest(cluster, shape, model, job, options), time.process_time)
        figures = fleet.record.gap, fleet.tokens_per_s, len(fleet.replicas)
        unused = len(fleet.unused_devices)
    else:
        plan = find_plan(cluster, shape, model, job, options, time.process_time).plan
        figures, unused = (
            (plan.solver.gap, plan.predicted.tokens_per_s, 1),
            len(plan.unused_devices),
        )
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Planned(devices, is_fleet, seconds, peak, *figures, unused)


def _in_a_process(kind: str, devices: int, model: str) -> Planned:
    command = [sys.executable, "-m", "benchmarks.planning.scale", "planner", "--model", model]
    done = subprocess.run(
        [*command, "--one", f"{kind}:{devices}"], check=True, capture_output=True, text=True
    )
    return Planned(**json.loads(done.stdout))


def table(points: Sequence[Planned]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield header("GPUs | plan of | seconds | gap | peak MB | tokens/s | pipelines | unused GPUs")
    for p in points:
        kind = "replicas" if p.is_fleet else "one pipeline"
        yield (
            f"| {p.devices} | {kind} | {p.seconds:.1f} | {p.gap:.1%} | {p.peak_bytes / 1e6:.0f} "
            f"| {p.tokens_per_s:,.0f} | {p.pipelines} | {p.unused} |"
        )


def plot(points: Sequence[Planned], path: Path) -> None:
    """Draw seconds, gap and memory against the number of GPUs; needs matplotlib."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
    labels = ("seconds", "gap, %", "peak of memory, MB")
    for is_fleet, label in ((False, "one pipeline"), (True, "replicas")):
        own = [p for p in points if p.is_fleet == is_fleet]
        devices = [p.devices for p in own]
        figures = (
            [p.seconds for p in own],
            [100 * p.gap for p in own],
            [p.peak_bytes / 1e6 for p in own],
        )
        for panel, values in zip(panels, figures, strict=True):
            panel.plot(devices, values, marker="o", label=label)
    for panel, label in zip(panels, labels, strict=True):
        panel.set_xscale("log")
        panel.set_xlabel("GPUs")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
    panels[0].legend()
    figure.savefig(path)
