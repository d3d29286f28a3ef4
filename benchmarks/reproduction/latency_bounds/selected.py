"""The schedules that are chosen for OPT 13B and task S, beside those of the paper (table 6).

python -m benchmarks.reproduction.latency_bounds selected [--update docs/latency_bounds.md]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planning.planner import update_page
from benchmarks.reproduction.latency_bounds.models import MODELS
from benchmarks.reproduction.latency_bounds.pipelines import Layout, Pipeline
from benchmarks.reproduction.latency_bounds.rra_schedules import RraSchedules, rra_of
from benchmarks.reproduction.latency_bounds.setting import Chosen, Setting
from benchmarks.reproduction.latency_bounds.tasks import TASKS
from benchmarks.reproduction.latency_bounds.waa_schedules import WaaSchedules, divided_of, waa_of
from planner.latency_bound.timeline import DOES_NOT_FIT, Performance

SECTION = "selected"


@dataclass(frozen=True)
class PaperRow:
    """A row of table 6. `newcomers` is B_E, `steps` is N_D (None: WAA), `degree` that of T_P."""

    bound_s: float
    newcomers: int
    steps: int | None
    degree: int
    latency_s: float
    requests_per_s: float

    @property
    def label(self) -> str:
        """The schedule in the paper's words."""
        if self.steps is None:
            return f"WAA: B_E={self.newcomers}, T_P={self.degree}"
        return f"RRA: B_E={self.newcomers}, N_D={self.steps}, T_P={self.degree}"


PAPER = (
    PaperRow(3.1, 4, None, 2, 3.01, 22.41),
    PaperRow(5.9, 10, None, 2, 4.11, 23.76),
    PaperRow(11.5, 52, 13, 4, 10.23, 25.23),
    PaperRow(math.inf, 49, 7, 4, 16.87, 26.15),
)


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
    """Yield the lines of the table: latency in seconds and requests per second of the paper's
    schedules, by the paper and by our simulation, and of ours.
    """
    setting = Setting(MODELS[0], TASKS["S"].lengths)
    rra, waa = rra_of(setting), waa_of(setting)
    yield (
        "| bound, s | the paper's | it states | our simulation of it | RRA | WAA "
        "| ours | FT here: bound, s |"
    )
    yield "|---" * 8 + "|"
    for row, own_bound_s in zip(PAPER, setting.bounds_s, strict=True):
        both = {"RRA": rra.best(row.bound_s), "WAA": waa.best(row.bound_s)}
        known = {name: each for name, each in both.items() if each is not None}
        best = max(known, key=lambda name: known[name].requests_per_s)
        cells = [
            _seconds(row.bound_s),
            row.label,
            f"{row.latency_s:.2f}: {row.requests_per_s:.1f}",
            _performance(as_published(setting, row)),
            *(_chosen(each) for each in both.values()),
            best,
            _seconds(own_bound_s),
        ]
        yield f"| {' | '.join(cells)} |"


def as_published(setting: Setting, row: PaperRow) -> Performance:
    """The performance of the paper's schedule by our simulation. Of WAA it does not say how GPUs
    are divided: the best way is taken, with one group.
    """
    costs = setting.model.costs
    if row.steps is not None:
        layout = Layout(row.degree, setting.model.count)
        pipeline = Pipeline.of(costs, costs.cluster.devices, layout, setting.lengths)
        assert pipeline is not None
        return RraSchedules(setting, layout, pipeline).performance_of(row.newcomers, row.steps)
    found = []
    for grouped in range(row.degree, setting.model.count + 1, row.degree):
        layout = Layout(row.degree, grouped)
        for gpus in range(1, setting.model.count):
            divided = divided_of(setting, layout, gpus)
            if divided is not None:
                schedules = WaaSchedules(setting, "waa-c", layout, divided)
                found.append(schedules.performance(schedules.point_of(row.newcomers)))
    fitting = [each for each in found if math.isfinite(each.latency_s)]
    return max(fitting, key=lambda each: each.requests_per_s, default=DOES_NOT_FIT)


def _performance(found: Performance) -> str:
    if found == DOES_NOT_FIT:
        return "no room"
    return f"{found.latency_s:.2f}: {found.requests_per_s:.1f}"


def _chosen(found: Chosen | None) -> str:
    if found is None:
        return "NS"
    return f"{found.latency_s:.2f}: {found.requests_per_s:.1f} ({found.label})"


def _seconds(bound_s: float) -> str:
    return f"{bound_s:.1f}" if math.isfinite(bound_s) else "none"
