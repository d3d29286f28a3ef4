"""What finding a schedule costs: monotonic controls (table 5), and evaluations and CPU seconds
beside looking at every schedule (section 7.7), of the paper's models and of random boxes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from benchmarks.lab import header, table_row
from benchmarks.reproduction.latency_bounds.models import (
    MODELS,
    TASKS,
    Layout,
    Pipeline,
    layouts_of,
)
from benchmarks.reproduction.latency_bounds.schedules import (
    RraSchedules,
    WaaSchedules,
    divided_of,
    rra_of,
    waa_of,
)
from benchmarks.reproduction.latency_bounds.setting import Bounded, Setting
from planner.latency_bound.timeline import DOES_NOT_FIT, Performance
from planner.lengths import FloatArray
from tests.planner.latency_bound.random_boxes import outcome_of, random_cases

SWEPT, SWEPT_TASKS = MODELS[1], ("S", "T")
TOLERANCES = (0.02, 0.05, 0.10)
VALUES = 16
"""Values of a control in a sweep."""
DEGREE = 4
GROUPS = (1, 2, 3, 4, 6, 8)
"""Decode micro-batches (B_m) that are swept."""
PREFILL_GPUS = 8
TABLE_5 = {
    ("S", 0.02): "(0.6, 2.3) | (0.0, 0.0) | (0.0, 0.0) | (0.0, 0.0) | (0.8, 0.0)",
    ("S", 0.05): "(0.6, 0.3) | (0.0, 0.0) | (0.0, 0.0) | (0.0, 0.0) | (0.5, 0.0)",
    ("S", 0.10): "(0.3, 0.0) | (0.0, 0.0) | (0.0, 0.0) | (0.0, 0.0) | (0.4, 0.0)",
    ("T", 0.02): "(0.2, 0.1) | (0.0, 0.0) | (0.1, 0.0) | (1.2, 0.0) | (10.9, 0.0)",
    ("T", 0.05): "(0.2, 0.0) | (0.0, 0.0) | (0.0, 0.0) | (0.8, 0.0) | (10.6, 0.0)",
    ("T", 0.10): "(0.2, 0.0) | (0.0, 0.0) | (0.0, 0.0) | (0.4, 0.0) | (10.4, 0.0)",
}
"""Percentages of latency and of throughput."""


@dataclass(frozen=True, eq=False)
class Swept:
    """Throughput and latency over the controls, which are axes by name in the order in which both
    should rise; NaN where requests have no room.
    """

    controls: tuple[str, ...]
    requests_per_s: FloatArray
    latency_s: FloatArray

    def falls(self, control: str, latency_s: float, requests_per_s: float) -> str:
        """Percentages of the points at which latency and throughput fall by more than this."""
        axis = self.controls.index(control)
        found = []
        for values, least in ((self.latency_s, latency_s), (self.requests_per_s, requests_per_s)):
            steps = np.diff(values, axis=axis)
            known = steps[~np.isnan(steps)]
            found.append(100 * float((known < -least).mean()) if known.size else float("nan"))
        return f"({found[0]:.1f}, {found[1]:.1f})"


def monotonicity_table() -> Iterator[str]:
    """Yield the lines of table 5, ours and the paper's. A point counts where latency is lower than
    at the point before by more than the tolerance's share of the bound (70th percentile of FT's
    latencies), or throughput by more than that share of what is reached within that bound.
    """
    yield header("task | tolerance | | RRA: B_E | N_D | WAA: B_E | T_P | B_m")
    for task in SWEPT_TASKS:
        setting = Setting(SWEPT, TASKS[task].lengths)
        bound_s = setting.bounds_s[2]
        within = (rra_of(setting).best(bound_s), waa_of(setting).best(bound_s))
        reached = max(each.requests_per_s for each in within if each is not None)
        rra, waa = rra_swept(setting), waa_swept(setting)
        columns = ((rra, "B_E"), (rra, "N_D"), (waa, "B_E"), (waa, "T_P"), (waa, "B_m"))
        for share in TOLERANCES:
            least = share * bound_s, share * reached
            cells = [swept.falls(control, *least) for swept, control in columns]
            yield table_row([task, f"{share:.0%}", "ours", *cells])
            yield table_row(["", "", "the paper", TABLE_5[task, share]])


def rra_swept(setting: Setting) -> Swept:
    """RRA over newcomers and decode steps on layouts with groups of one degree."""
    costs, made = setting.model.costs, []
    for layout in _layouts(setting):
        pipeline = Pipeline.of(costs, costs.cluster.devices, layout, setting.lengths)
        assert pipeline is not None
        made.append(RraSchedules(setting, layout, pipeline))
    newcomers = _spaced(min(each.newcomers[-1] for each in made))
    steps = _spaced(made[0].steps[0])[::-1]
    layers = [_grid((newcomers, steps), schedules.performance_of) for schedules in made]
    return Swept(("T_P", "B_E", "N_D"), *np.moveaxis(np.array(layers), 1, 0))


def waa_swept(setting: Setting) -> Swept:
    """WAA over newcomers and decode micro-batches, at most one for each stage that decodes, with
    half of the GPUs for prefill, on layouts with fewer and fewer groups.
    """
    layers = []
    for layout in _layouts(setting):
        divided = divided_of(setting, layout, PREFILL_GPUS)
        if divided is None:
            continue
        schedules = WaaSchedules(setting, "waa-c", layout, divided)

        def performance(requests: int, groups: int, own: WaaSchedules = schedules) -> Performance:
            if groups > len(own.divided.decode.stages):
                return DOES_NOT_FIT
            schedule = replace(own.schedule_at(own.point_of(requests)), decode_micro_batches=groups)
            return own.performance_of(schedule)

        layers.append(_grid((range(1, VALUES + 1), GROUPS[::-1]), performance))
    return Swept(("T_P", "B_E", "B_m"), *np.moveaxis(np.array(layers), 1, 0))


def _layouts(setting: Setting) -> list[Layout]:
    """With groups of one degree on all GPUs, then on fewer and fewer, at last on none."""
    found = layouts_of(setting.model, setting.model.count)
    chosen = [each for each in found if not each.grouped or each.degree == DEGREE]
    return sorted(chosen, key=lambda each: -each.grouped)


def _grid(
    values: Sequence[Sequence[int]], performance: Callable[[int, int], Performance]
) -> FloatArray:
    """Throughput and latency [2, values, values] of all combinations; NaN where nothing fits."""
    found = [performance(*pair) for pair in product(*values)]
    rows = [
        (x.requests_per_s, x.latency_s) if np.isfinite(x.latency_s) else (np.nan, np.nan)
        for x in found
    ]
    return np.array(rows).T.reshape(2, *map(len, values))


def _spaced(most: int) -> list[int]:
    """About `VALUES` whole numbers in a geometric row."""
    return sorted({round(each) for each in np.geomspace(1, most, VALUES).tolist()})


CASES = ((MODELS[0], "S"), (MODELS[0], "T"), (MODELS[1], "S"), (MODELS[2], "G"))
SAMPLE = 60
PAPER_COSTS = "3 s to 5 min", "5 h to a day"


def scheduling_cost_table() -> Iterator[str]:
    """Yield the lines of the table of costs at the four bounds of each case, one by one. Every
    schedule is one of all newcomers and decode steps that are tried, on every layout: what one of
    them takes is measured on a random sample.
    """
    yield header(
        "model, task | kind | schedules | evaluated for a bound | share | CPU s for a bound | all "
        "of them, CPU s"
    )
    for model, task in CASES:
        setting = Setting(model, TASKS[task].lengths)
        bounds_s = setting.bounds_s
        for kind, made in (("RRA", rra_of), ("WAA", waa_of)):
            evaluated, seconds = [], []
            for bound_s in bounds_s:
                anew = made(setting)
                began_s = time.process_time()
                anew.best(bound_s)
                seconds.append(time.process_time() - began_s)
                evaluated.append(anew.evaluations)
            whole = made(setting)
            count = sum(math.prod(map(len, each.ranges)) for each in whole.layouts)
            yield table_row(
                [
                    f"{model.label}, {task}",
                    kind,
                    f"{count:,}",
                    f"{min(evaluated)} to {max(evaluated)}",
                    f"{np.mean(evaluated) / max(1, count):.2%}",
                    f"{min(seconds):.1f} to {max(seconds):.1f}",
                    f"{count * seconds_of_one(whole):,.0f}",
                ]
            )
    yield f"| the paper's models | both | | | | {PAPER_COSTS[0]} | {PAPER_COSTS[1]} |"


def seconds_of_one(whole: Bounded) -> float:
    """Mean CPU seconds of a schedule, by a sample of those of all layouts."""
    generator = np.random.default_rng(0)
    sizes = np.array([math.prod(map(len, each.ranges)) for each in whole.layouts], dtype=float)
    if not sizes.size:
        return 0.0
    chosen = generator.choice(len(sizes), size=SAMPLE, p=sizes / sizes.sum())
    began_s = time.process_time()
    for schedules in (whole.layouts[place] for place in chosen.tolist()):
        schedules.performance(tuple(int(generator.choice(each)) for each in schedules.ranges))
    return (time.process_time() - began_s) / SAMPLE


RANDOM_CASES = 300


def search_cost_table() -> Iterator[str]:
    """Yield the lines of the table: the evaluated share of random boxes by number of controls."""
    yield header("cases | number | mean evaluated | median | 90 % | most | least throughput")
    outcomes = [outcome_of(case) for case in random_cases(RANDOM_CASES)]
    kinds = {f"{each.controls} controls" for each in outcomes}
    for name in (*sorted(kinds), "all"):
        chosen = [each for each in outcomes if name in ("all", f"{each.controls} controls")]
        evaluated = np.array([each.evaluated for each in chosen])
        figures = (evaluated.mean(), *np.quantile(evaluated, (0.5, 0.9, 1)))
        least = min(each.reached for each in chosen)
        yield table_row([name, len(chosen), *(f"{x:.2%}" for x in figures), f"{least:.4f}"])
