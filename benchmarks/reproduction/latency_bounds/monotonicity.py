"""Points at which throughput or latency falls where it should rise with a control (table 5).

    python -m benchmarks.reproduction.latency_bounds monotonicity [--update docs/latency_bounds.md]

GPT-3 39B, tasks S and T, as in the paper. Each control is swept over a grid, the others fixed, for
all combinations of these; a point counts where latency is lower than at the point before by more
than the tolerance's share of the bound (70th percentile of FasterTransformer's latencies), or
throughput by more than that share of what is reached within that bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.planning.planner import update_page
from benchmarks.reproduction.latency_bounds.layouts import layouts_with
from benchmarks.reproduction.latency_bounds.models import MODELS
from benchmarks.reproduction.latency_bounds.pipelines import Pipeline
from benchmarks.reproduction.latency_bounds.rra_schedules import RraSchedules, rra_of
from benchmarks.reproduction.latency_bounds.setting import Setting
from benchmarks.reproduction.latency_bounds.tasks import TASKS
from benchmarks.reproduction.latency_bounds.waa_schedules import WaaSchedules, divided_of, waa_of
from planner.latency_bound.timeline import DOES_NOT_FIT, Performance
from planner.length_distribution import FloatArray

SECTION = "monotonicity"
MODEL, TASK_NAMES = "GPT-3 39B", ("S", "T")
TOLERANCES = (0.02, 0.05, 0.10)
VALUES = 16
"""Values of a control in a sweep."""
DEGREE = 4
GROUPS = (1, 2, 3, 4, 6, 8)
"""Decode micro-batches (B_m) that are swept."""
PREFILL_GPUS = 8
PAPER = {
    ("S", 0.02): "(0.6, 2.3) | (0.0, 0.0) | (0.0, 0.0) | (0.0, 0.0) | (0.8, 0.0)",
    ("S", 0.05): "(0.6, 0.3) | (0.0, 0.0) | (0.0, 0.0) | (0.0, 0.0) | (0.5, 0.0)",
    ("S", 0.10): "(0.3, 0.0) | (0.0, 0.0) | (0.0, 0.0) | (0.0, 0.0) | (0.4, 0.0)",
    ("T", 0.02): "(0.2, 0.1) | (0.0, 0.0) | (0.1, 0.0) | (1.2, 0.0) | (10.9, 0.0)",
    ("T", 0.05): "(0.2, 0.0) | (0.0, 0.0) | (0.0, 0.0) | (0.8, 0.0) | (10.6, 0.0)",
    ("T", 0.10): "(0.2, 0.0) | (0.0, 0.0) | (0.0, 0.0) | (0.4, 0.0) | (10.4, 0.0)",
}
"""Table 5 of the paper: percentages of latency and of throughput."""


@dataclass(frozen=True, eq=False)
class Swept:
    """Throughput and latency over the controls, which are axes by name in the order in which both
    should rise; NaN where requests have no room.
    """

    controls: tuple[str, ...]
    requests_per_s: FloatArray
    latency_s: FloatArray

    def falls(self, control: str, latency_s: float, requests_per_s: float) -> tuple[float, float]:
        """Percentages of the points at which latency and throughput fall by more than this."""
        axis = self.controls.index(control)
        found = []
        for values, least in ((self.latency_s, latency_s), (self.requests_per_s, requests_per_s)):
            steps = np.diff(values, axis=axis)
            known = steps[~np.isnan(steps)]
            found.append(100 * float((known < -least).mean()) if known.size else float("nan"))
        return found[0], found[1]


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
    """Yield the lines of the table: ours, then the paper's."""
    yield "| task | tolerance | | RRA: B_E | N_D | WAA: B_E | T_P | B_m |"
    yield "|---" * 8 + "|"
    model = next(each for each in MODELS if each.name == MODEL)
    for task in TASK_NAMES:
        setting = Setting(model, TASKS[task].lengths)
        bound_s = setting.bounds_s[2]
        within = (rra_of(setting).best(bound_s), waa_of(setting).best(bound_s))
        reached = max(each.requests_per_s for each in within if each is not None)
        rra, waa = rra_swept(setting), waa_swept(setting)
        columns = ((rra, "B_E"), (rra, "N_D"), (waa, "B_E"), (waa, "T_P"), (waa, "B_m"))
        for share in TOLERANCES:
            least = share * bound_s, share * reached
            cells = [swept.falls(control, *least) for swept, control in columns]
            ours = " | ".join(f"({latency:.1f}, {rate:.1f})" for latency, rate in cells)
            yield f"| {task} | {share:.0%} | ours | {ours} |"
            yield f"| | | the paper | {PAPER[task, share]} |"


def rra_swept(setting: Setting) -> Swept:
    """RRA over newcomers and decode steps on layouts with groups of one degree."""
    costs = setting.model.costs
    made = []
    for layout in layouts_with(setting.model, DEGREE):
        pipeline = Pipeline.of(costs, costs.cluster.devices, layout, setting.lengths)
        assert pipeline is not None
        made.append(RraSchedules(setting, layout, pipeline))
    newcomers = spaced(1, min(each.newcomers[-1] for each in made))
    steps = spaced(1, made[0].steps[0])[::-1]
    layers = [grid((newcomers, steps), schedules.performance_of) for schedules in made]
    return Swept(("T_P", "B_E", "N_D"), *np.moveaxis(np.array(layers), 1, 0))


def waa_swept(setting: Setting) -> Swept:
    """WAA over newcomers and decode micro-batches, at most one for each stage that decodes, with
    half of the GPUs for prefill, on layouts with fewer and fewer groups.
    """
    layers = []
    for layout in layouts_with(setting.model, DEGREE):
        divided = divided_of(setting, layout, PREFILL_GPUS)
        assert divided is not None
        schedules = WaaSchedules(setting, "waa-c", layout, divided)
        newcomers = range(1, VALUES + 1)

        def performance(requests: int, groups: int, own: WaaSchedules = schedules) -> Performance:
            if groups > len(own.divided.decode.stages):
                return DOES_NOT_FIT
            schedule = replace(own.schedule_at(own.point_of(requests)), decode_micro_batches=groups)
            return own.performance_of(schedule)

        layers.append(grid((newcomers, GROUPS[::-1]), performance))
    return Swept(("T_P", "B_E", "B_m"), *np.moveaxis(np.array(layers), 1, 0))


def grid(
    values: Sequence[Sequence[int]], performance: Callable[[int, int], Performance]
) -> FloatArray:
    """Throughput and latency [2, values, values] of all combinations; NaN where nothing fits."""
    found = [performance(*pair) for pair in product(*values)]
    rows = [
        (x.requests_per_s, x.latency_s) if np.isfinite(x.latency_s) else (np.nan, np.nan)
        for x in found
    ]
    return np.array(rows).T.reshape(2, *map(len, values))


def spaced(low: int, high: int) -> list[int]:
    """About `VALUES` whole numbers in a geometric row."""
    return sorted({round(each) for each in np.geomspace(low, high, VALUES).tolist()})
