"""FT and ours with recorded lengths instead of truncated normals (fig. 10).

    python -m benchmarks.reproduction.latency_bounds recorded --data REFERENCE_DATA [--update PAGE]

The paper has WMT, Alpaca and CNN; here are the requests of two services, and answers of Vicuna 13B
with prompts of one of them. As in the paper a tenth of the requests is what schedules are made for,
and the others are what they run with.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.planning.planner import update_page
from benchmarks.reproduction.latency_bounds.bounded import Bounded
from benchmarks.reproduction.latency_bounds.models import MODELS, POSITIONS, Model
from benchmarks.reproduction.latency_bounds.rivals import FixedBatches
from benchmarks.reproduction.latency_bounds.rra_schedules import rra_of
from benchmarks.reproduction.latency_bounds.setting import Setting
from benchmarks.reproduction.latency_bounds.waa_schedules import waa_of
from planner.latency_bound.timeline import Timeline
from planner.length_distribution import LengthDistribution, RequestLengths
from planner.lengths import IntArray

SECTION = "recorded lengths"
KNOWN = 0.1
"""The share of requests whose lengths are known beforehand (section 7.5)."""
TRACES = ("conv", "code")
BOUNDS = (1, 3)
"""The bounds of the setting that are tried: 30 % of FasterTransformer's latencies, and none."""
PAPER = "| paper: WMT, Alpaca, CNN, mean | | | | | | 4.4 | |"


@dataclass(frozen=True)
class Recorded:
    """Prompt and output tokens of requests that models of 2,048 positions can run [requests]."""

    name: str
    prompts: IntArray
    outputs: IntArray
    kept: float

    def parts(self) -> tuple[RequestLengths, RequestLengths]:
        """The lengths of a tenth of the requests, and those of the others."""
        order = np.random.default_rng(0).permutation(len(self.prompts))
        first, others = np.split(order, [round(KNOWN * len(order))])
        return self._lengths(first), self._lengths(others)

    def _lengths(self, rows: IntArray) -> RequestLengths:
        columns = (self.prompts[rows], self.outputs[rows])
        return RequestLengths(*(LengthDistribution.of_sample(each) for each in columns))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--data", type=Path, required=True, help="folder of the reference data")
    parser.add_argument("--update", type=Path, help="page whose table is replaced")


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    lines = list(table(options.data))
    print("\n".join(lines))
    if options.update is not None:
        update_page(options.update, SECTION, lines)


def table(data: Path) -> Iterator[str]:
    """Yield the lines of the table: requests per second with the lengths of the other requests."""
    yield (
        "| lengths | model, GPUs | bound, s | FT | RRA | WAA | ours / FT "
        "| latency over the planned one |"
    )
    yield "|---" * 8 + "|"
    ratios: list[float] = []
    for recorded in recordings(data):
        known, others = recorded.parts()
        for model in MODELS[:2]:
            yield from _lines(recorded, model, known, others, ratios)
    yield f"| mean of {len(ratios)} | | | | | | {np.mean(ratios):.1f} | |"
    yield PAPER


def _lines(
    recorded: Recorded,
    model: Model,
    known: RequestLengths,
    others: RequestLengths,
    ratios: list[float],
) -> Iterator[str]:
    planned, true = Setting(model, known), Setting(model, others)
    even = FixedBatches(true.batches, true.bounded_output)
    for number in BOUNDS:
        bound_s = planned.bounds_s[number]
        ft = even.best(bound_s)
        found = {
            name: run_with(find(planned), bound_s, others)
            for name, find in (("RRA", rra_of), ("WAA", waa_of))
        }
        rates = {
            name: each.performance.requests_per_s if each else 0 for name, each in found.items()
        }
        best = max(rates, key=lambda name: rates[name])
        timeline = found[best]
        ratio = late = "–"
        if timeline is not None and ft is not None:
            ratios.append(rates[best] / ft.requests_per_s)
            ratio = f"{ratios[-1]:.1f}"
        if timeline is not None and math.isfinite(bound_s):
            late = f"{timeline.latency_of(planned.bounded_output) / bound_s:.2f}"
        cells = [
            f"{recorded.name} ({recorded.kept:.0%})",
            model.label,
            f"{bound_s:.1f}" if math.isfinite(bound_s) else "none",
            f"{ft.requests_per_s:.2f}" if ft else "NS",
            *(f"{rate:.2f}" if rate else "NS" for rate in rates.values()),
            ratio,
            late,
        ]
        yield f"| {' | '.join(cells)} |"


def run_with(schedules: Bounded, bound_s: float, lengths: RequestLengths) -> Timeline | None:
    """The timeline of the best schedule within the bound with other lengths than it is for."""
    placed = schedules.placed(bound_s)
    if placed is None:
        return None
    return placed.schedules.timeline(placed.schedules.schedule_at(placed.point), lengths)


def recordings(data: Path) -> Iterator[Recorded]:
    """Yield the recorded requests, without those beyond the models' positions."""
    traces = {name: _columns(data / "traces" / f"splitwise_{name}.csv") for name in TRACES}
    for name, columns in traces.items():
        yield _within(name, *columns)
    with (data / "lengths" / "vicuna13b_predictions.csv").open(encoding="utf-8") as file:
        outputs = np.array([int(row["output_tokens"]) for row in csv.DictReader(file)])
    prompts = np.random.default_rng(0).choice(traces["conv"][0], len(outputs))
    yield _within("vicuna", prompts, outputs)


def _columns(path: Path) -> tuple[IntArray, IntArray]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    prompts, outputs = (
        np.array([int(row[name]) for row in rows])
        for name in ("num_prefill_tokens", "num_decode_tokens")
    )
    return prompts, outputs


def _within(name: str, prompts: IntArray, outputs: IntArray) -> Recorded:
    kept = (prompts + outputs <= POSITIONS) & (outputs > 0)
    return Recorded(name, prompts[kept], outputs[kept], float(kept.mean()))
