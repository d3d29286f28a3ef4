"""Throughput and latency where outputs are unlike those that a schedule is for (fig. 11).

    python -m benchmarks.reproduction.latency_bounds changed_lengths [--update PAGE]
                                                        [--plot FILE]

Task T on OPT 13B. Mean, deviation or skewness of the outputs changes, the other two stay. The
schedule stays as it is, or is chosen anew for the changed lengths (adjusted).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planning.planner import update_page
from benchmarks.reproduction.latency_bounds.models import MODELS
from benchmarks.reproduction.latency_bounds.rra_schedules import rra_of
from benchmarks.reproduction.latency_bounds.setting import Setting
from benchmarks.reproduction.latency_bounds.tasks import (
    TASKS,
    skewed_normal_of,
    truncated_normal_of,
)
from benchmarks.reproduction.latency_bounds.waa_schedules import waa_of
from planner.length_distribution import LengthDistribution, RequestLengths

SECTION = "changed lengths"
TASK = TASKS["T"]
FACTORS = (0.7, 0.85, 1.0, 1.15, 1.3)
SKEWNESS = (-0.4, -0.2, 0.0, 0.2, 0.4)
PAPER = (
    "mean 1.15: latency 1.13 (all), 1.10 (one length); deviation 1.3: 1.05, 1.00; RRA: throughput "
    "within 28 %, latency within 12.6 % for means, 11 % and 17 % for the others"
)


@dataclass(frozen=True)
class Changed:
    """A change of the outputs: requests per second and latencies of the schedule that stays, and
    requests per second of the one that is adjusted. `all_s` is the 99th percentile of all requests,
    `one_s` that of the output at which the schedule was bounded.
    """

    kind: str
    what: str
    value: float
    kept_per_s: float
    adjusted_per_s: float
    all_s: float
    one_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--update", type=Path, help="page whose table is replaced")
    parser.add_argument("--plot", type=Path, help="picture to draw (SVG)")


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    found = [*changes("WAA"), *changes("RRA")]
    lines = list(table(found))
    print("\n".join(lines))
    if options.update is not None:
        update_page(options.update, SECTION, lines)
    if options.plot is not None:
        plot(found, options.plot)


def changes(kind: str) -> Iterator[Changed]:
    """Yield all changes for the schedule that is best at the least bound that it can keep of those
    of 30 and 70 % of FasterTransformer's latencies.
    """
    setting = Setting(MODELS[0], TASK.lengths)
    find = rra_of if kind == "RRA" else waa_of
    for bound_s in setting.bounds_s[1:3]:
        placed = find(setting).placed(bound_s)
        if placed is not None:
            break
    assert placed is not None
    schedule = placed.schedules.schedule_at(placed.point)
    for what, value, outputs in distributions():
        lengths = RequestLengths(setting.lengths.prompts, outputs)
        kept = placed.schedules.timeline(schedule, lengths)
        anew = Setting(setting.model, lengths)
        adjusted = find(anew).best(bound_s)
        yield Changed(
            kind,
            what,
            value,
            kept.performance.requests_per_s,
            0.0 if adjusted is None else adjusted.requests_per_s,
            kept.performance.latency_s,
            kept.latency_of(setting.bounded_output),
        )


def distributions() -> Iterator[tuple[str, float, LengthDistribution]]:
    """Yield changed outputs; where their mean grows, so does the longest."""
    mean, deviation, longest = TASK.outputs.mean, TASK.outputs.deviation, TASK.outputs.longest
    for factor in FACTORS:
        most = round(longest * max(1.0, factor))
        yield "mean", factor, truncated_normal_of(factor * mean, deviation, most)
    for factor in FACTORS:
        yield "deviation", factor, truncated_normal_of(mean, factor * deviation, longest)
    for skewness in SKEWNESS:
        yield "skewness", skewness, skewed_normal_of(mean, deviation, longest, skewness)


def table(found: Sequence[Changed]) -> Iterator[str]:
    """Yield the lines of the table; latencies are multiples of those without a change."""
    yield "| schedule | changed | by | stays, req/s | adjusted, req/s | 99 % of all | one length |"
    yield "|---" * 7 + "|"
    usual = {each.kind: each for each in found if each.what == "mean" and each.value == 1.0}
    for each in found:
        base = usual[each.kind]
        cells = [
            each.kind,
            each.what,
            f"{each.value:g}",
            f"{each.kept_per_s:.2f}",
            f"{each.adjusted_per_s:.2f}" if each.adjusted_per_s else "NS",
            f"{each.all_s / base.all_s:.2f}",
            f"{each.one_s / base.one_s:.2f}",
        ]
        yield f"| {' | '.join(cells)} |"


def plot(found: Sequence[Changed], path: Path) -> None:
    """Draw throughput as bars and latency as a line, a panel for each change; needs matplotlib."""
    import matplotlib.pyplot as plt

    kinds, changed = (
        list(dict.fromkeys(getattr(each, name) for each in found)) for name in ("kind", "what")
    )
    figure, panels = plt.subplots(len(kinds), len(changed), figsize=(10, 5), layout="constrained")
    for row, kind in zip(panels, kinds, strict=True):
        for panel, what in zip(row, changed, strict=True):
            own = [each for each in found if (each.kind, each.what) == (kind, what)]
            places = range(len(own))
            panel.bar([p - 0.2 for p in places], [e.kept_per_s for e in own], 0.4, label="stays")
            adjusted = [each.adjusted_per_s for each in own]
            panel.bar([p + 0.2 for p in places], adjusted, 0.4, label="adjusted")
            panel.set_xticks(places, [f"{each.value:g}" for each in own], fontsize=8)
            panel.set_title(f"{kind}: {what}", fontsize=9)
            latency = panel.twinx()
            latency.plot(places, [each.all_s for each in own], "k.-", label="99th percentile, s")
            latency.set_ylim(bottom=0)
    panels[0][0].set_ylabel("requests/s")
    panels[0][0].legend(fontsize=7)
    figure.savefig(path)
