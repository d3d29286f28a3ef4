"""Throughput of FT, DSI, ORCA, vLLM and ours on the paper's models, tasks and bounds (fig. 6 to 8).

    python -m benchmarks.reproduction.latency_bounds throughput [--models 13B 39B] [--tasks S T]
                                                   [--update docs/measurements/latency_bounds.md]

Everything is simulated, on the same times by datasheets; each scheduler has its best sizes within
the bound.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.lab import header, table_row, update_page
from benchmarks.reproduction.latency_bounds.models import MODELS, TASKS, Model
from benchmarks.reproduction.latency_bounds.schedules import rra_of, waa_of
from benchmarks.reproduction.latency_bounds.setting import (
    Chosen,
    FixedBatches,
    Scheduler,
    Setting,
    rivals_of,
)

SECTION, SUMMARY = "throughput", "ratios"
RIVALS, OURS = ("FT", "DSI", "ORCA", "vLLM"), ("RRA", "WAA")
"""Columns of the table."""
PAPER = {
    "small and mid-sized": 2.0,
    "large": 3.2,
    "large, no bound": 2.2,
    "all": 2.9,
    "most": 15.2,
}
"""Ratios that the paper states (sections 1, 7.3 and 7.4)."""


@dataclass(frozen=True)
class Cell:
    """All schedulers on a model, task and bound; None where one cannot keep it. `even_ft`: FT with
    the bound at the output at which all others have it.
    """

    model: Model
    task: str
    bound_s: float
    chosen: Mapping[str, Chosen | None]
    even_ft: Chosen | None

    @property
    def ours(self) -> Chosen | None:
        """The better one of ours."""
        found = [each for name in OURS if (each := self.chosen[name]) is not None]
        return max(found, key=lambda each: each.requests_per_s, default=None)

    def ratio(self, even: bool = False) -> float:
        """Requests a second of ours over FT's; NaN where either keeps no bound."""
        ft = self.even_ft if even else self.chosen["FT"]
        if self.ours is None or ft is None:
            return math.nan
        return self.ours.requests_per_s / ft.requests_per_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--models", nargs="+", help="parts of names, such as 13B")
    parser.add_argument("--tasks", nargs="+", choices=TASKS)
    parser.add_argument("--update", type=Path, help="page whose tables are replaced")


def run(options: argparse.Namespace) -> None:
    """Print the tables."""
    began_s = time.process_time()
    cells: list[Cell] = []
    for model in MODELS:
        if options.models and not any(part in model.label for part in options.models):
            continue
        for task in model.tasks:
            if not options.tasks or task in options.tasks:
                cells += cells_of(model, task)
                seconds = time.process_time() - began_s
                print(f"{model.label}, {task}: {seconds:.0f} s", file=sys.stderr, flush=True)
    sections = {SECTION: list(table(cells)), SUMMARY: list(summary(cells))}
    for section, lines in sections.items():
        print("\n".join(lines))
        if options.update is not None:
            update_page(options.update, section, lines)


def cells_of(model: Model, task: str) -> Iterator[Cell]:
    """Yield the cells of all four bounds."""
    setting = Setting(model, TASKS[task].lengths)
    schedulers: dict[str, Scheduler] = {
        **rivals_of(setting),
        "RRA": rra_of(setting),
        "WAA": waa_of(setting),
    }
    even = FixedBatches(setting.batches, setting.bounded_output)
    for bound_s in setting.bounds_s:
        chosen = {name: each.best(bound_s) for name, each in schedulers.items()}
        yield Cell(model, task, bound_s, chosen, even.best(bound_s))


def table(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the lines of the table: requests per second, and how many times FT's ours are."""
    names = " | ".join((*RIVALS, *OURS))
    yield header(f"model, GPUs | task | bound, s | {names} | ours / FT | schedule")
    for cell in cells:
        rates = [rate_of(cell.chosen[name]) for name in (*RIVALS, *OURS)]
        ours = cell.ours
        winner = "" if ours is None else next(n for n in OURS if cell.chosen[n] is ours)
        label = "" if ours is None else f"{winner}: {ours.label}"
        bound = f"{cell.bound_s:.1f}" if math.isfinite(cell.bound_s) else "none"
        line = [cell.model.label, cell.task, bound, *rates, ratio_of(cell), label]
        yield table_row(line)


def rate_of(chosen: Chosen | None) -> str:
    """Requests a second in a cell; NS as in the paper where the bound cannot be kept."""
    return "NS" if chosen is None else f"{chosen.requests_per_s:.2f}"


def ratio_of(cell: Cell) -> str:
    """How many times FT's requests a second ours are, and in brackets FT's with an even bound."""
    even = cell.ratio(even=True)
    strict = cell.ratio()
    if math.isnan(even):
        return "–" if math.isnan(strict) else f"{strict:.1f}"
    return f"– ({even:.1f})" if math.isnan(strict) else f"{strict:.1f} ({even:.1f})"


def summary(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the lines of a table of mean ratios beside the paper's."""
    small = [c for c in cells if c.task in c.model.small_tasks]
    large = [c for c in cells if c.task in c.model.large_tasks]
    kinds = {
        "small and mid-sized": small,
        "large": large,
        "large, no bound": [c for c in large if math.isinf(c.bound_s)],
        "all": list(cells),
    }
    yield header(
        "ours / FT | cells | mean | where FT keeps it | mean, bound at one output | the paper"
    )
    for name, own in kinds.items():
        if not own:
            continue
        strict = np.array([c.ratio() for c in own])
        even = np.array([c.ratio(even=True) for c in own])
        kept = int((~np.isnan(strict)).sum())
        yield (
            f"| {name} | {len(own)} | {np.nanmean(strict):.1f} | {kept} "
            f"| {np.nanmean(even):.1f} | {PAPER[name]} |"
        )
    strict = np.nanmax([c.ratio() for c in cells])
    even = np.nanmax([c.ratio(even=True) for c in cells])
    yield f"| most | | {strict:.1f} | | {even:.1f} | {PAPER['most']} |"
