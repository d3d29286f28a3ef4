"""FT, DSI, ORCA and vLLM on OPT 13B and four A40, all tasks and bounds (fig. 7).

    python -m benchmarks.reproduction.latency_bounds existing [--update docs/latency_bounds.md]

The paper measures ORCA and vLLM on an engine in Python, whose time between passes is not hidden.
So both are simulated without and with such a time.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from benchmarks.planning.planner import update_page
from benchmarks.reproduction.latency_bounds.iteration_level import ORCA, VLLM
from benchmarks.reproduction.latency_bounds.models import MODELS
from benchmarks.reproduction.latency_bounds.rivals import IterationLevelSizes, rivals_of
from benchmarks.reproduction.latency_bounds.setting import Scheduler, Setting
from benchmarks.reproduction.latency_bounds.tasks import TASKS
from benchmarks.reproduction.latency_bounds.throughput import RIVALS, rate_of

SECTION = "existing"
HOST_S = 0.03
"""Seconds between two passes, an assumption: in vLLM 0.5, a year younger than the version of the
paper, the GPU was busy for 38 % of the time with LLaMA 8B (vLLM's blog on version 0.6, 2024)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--update", type=Path, help="page whose table is replaced")


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    lines = list(table())
    print("\n".join(lines))
    if options.update is not None:
        update_page(options.update, SECTION, lines)


def table() -> Iterator[str]:
    """Yield the lines of the table: requests per second of each."""
    waits = f"{1e3 * HOST_S:.0f} ms"
    yield f"| task | bound, s | {' | '.join(RIVALS)} | ORCA, {waits} | vLLM, {waits} | first |"
    yield "|---" * (5 + len(RIVALS)) + "|"
    for name, task in TASKS.items():
        setting = Setting(MODELS[0], task.lengths)
        schedulers: dict[str, Scheduler] = {
            **rivals_of(setting),
            f"ORCA, {waits}": IterationLevelSizes(setting, ORCA, HOST_S),
            f"vLLM, {waits}": IterationLevelSizes(setting, VLLM, HOST_S),
        }
        for bound_s in setting.bounds_s:
            found = {key: each.best(bound_s) for key, each in schedulers.items()}
            rates = {key: each.requests_per_s for key, each in found.items() if each is not None}
            bound = f"{bound_s:.1f}" if math.isfinite(bound_s) else "none"
            first = max(rates, key=lambda key: rates[key], default="–")
            cells = " | ".join(map(rate_of, found.values()))
            yield f"| {name} | {bound} | {cells} | {first} |"
