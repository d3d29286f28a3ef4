"""FT and ours with recorded lengths instead of truncated normals (fig. 10).

The paper has WMT, Alpaca and CNN; here are the requests of two services, and answers of Vicuna 13B
with prompts of one of them. As in the paper a tenth of the requests is what schedules are made for,
and the others are what they run with.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.lab import DATA, header, show, table_row
from benchmarks.reproduction.gpts import POSITIONS
from benchmarks.reproduction.latency_bounds.models import MODELS
from benchmarks.reproduction.latency_bounds.schedules import rra_of, waa_of
from benchmarks.reproduction.latency_bounds.setting import Bounded, FixedBatches, Setting
from benchmarks.reproduction.orca.traces import recorded_tokens
from planner.latency_bound.timeline import Timeline
from planner.lengths import IntArray, RequestLengths

KNOWN = 0.1
"""The share of requests whose lengths are known beforehand (section 7.5)."""
BOUNDS = (1, 3)
"""The bounds of the setting that are tried: 30 % of FasterTransformer's latencies, and none."""
PAPER = "4.4 (WMT, Alpaca, CNN; at most 8.7)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the reference data")


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    show(table(options.data))


def table(data: Path) -> Iterator[str]:
    """Yield the lines of the table: requests per second with the lengths of the other requests."""
    yield header(
        "lengths | model, GPUs | bound, s | FT | RRA | WAA | ours / FT | latency over the planned"
    )
    ratios: list[float] = []
    for name, rows in recordings(data):
        kept = rows[(rows.sum(axis=1) <= POSITIONS) & (rows[:, 1] > 0)]
        order = np.random.default_rng(0).permutation(kept)
        known, others = (
            RequestLengths.of_pairs(*part.T)
            for part in np.split(order, [round(KNOWN * len(order))])
        )
        for model in MODELS[:2]:
            for cells in _rows(Setting(model, known), Setting(model, others), ratios):
                yield table_row([f"{name} ({len(kept) / len(rows):.0%})", model.label, *cells])
    yield f"| mean of {len(ratios)} | | | | | | {np.mean(ratios):.1f} ({max(ratios):.1f}) | |"
    yield f"| the paper | | | | | | {PAPER} | |"


def _rows(planned: Setting, true: Setting, ratios: list[float]) -> Iterator[list[str]]:
    batches = FixedBatches(true.batches, true.bounded_output)
    ours = {"RRA": rra_of(planned), "WAA": waa_of(planned)}
    for bound_s in (planned.bounds_s[number] for number in BOUNDS):
        ft = batches.best(bound_s)
        runs = [run_with(each, bound_s, true.lengths) for each in ours.values()]
        rates = [0.0 if each is None else each.performance.requests_per_s for each in runs]
        best = runs[int(np.argmax(rates))]
        ratio = late = "–"
        if best is not None and ft is not None:
            ratios.append(max(rates) / ft.requests_per_s)
            ratio = f"{ratios[-1]:.1f}"
        bounded = math.isfinite(bound_s)
        if best is not None and bounded:
            late = f"{best.latency_of(planned.bounded_output) / bound_s:.2f}"
        yield [
            f"{bound_s:.1f}" if bounded else "none",
            f"{ft.requests_per_s:.2f}" if ft else "NS",
            *(f"{rate:.2f}" if rate else "NS" for rate in rates),
            ratio,
            late,
        ]


def run_with(schedules: Bounded, bound_s: float, lengths: RequestLengths) -> Timeline | None:
    """The timeline of the best schedule within the bound with other lengths than it is for."""
    placed = schedules.placed(bound_s)
    if placed is None:
        return None
    return placed.schedules.timeline(placed.schedules.schedule_at(placed.point), lengths)


def recordings(data: Path) -> Iterator[tuple[str, IntArray]]:
    """Yield the recorded requests' prompt and output tokens [requests, 2]."""
    traces = {name: recorded_tokens(data, name) for name in ("conv", "code")}
    yield from traces.items()
    path = data / "lengths" / "vicuna13b_predictions.csv"
    outputs = np.loadtxt(path, np.int64, delimiter=",", skiprows=1, usecols=0)
    prompts = np.random.default_rng(0).choice(traces["conv"][:, 0], len(outputs))
    yield "vicuna", np.column_stack([prompts, outputs])
