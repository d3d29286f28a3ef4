"""What finding a schedule costs: evaluations and CPU seconds beside looking at every schedule.

    python -m benchmarks.reproduction.latency_bounds scheduling_cost [--update PAGE]

Every schedule is one of all newcomers and decode steps that are tried, on every layout: what one of
them takes is measured on a random sample. One layout is searched exhaustively in truth, to see that
branch and bound finds the best there is.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.planning.planner import update_page
from benchmarks.reproduction.latency_bounds.bounded import Bounded, Schedules, remembered
from benchmarks.reproduction.latency_bounds.models import MODELS
from benchmarks.reproduction.latency_bounds.rra_schedules import RraSchedules, rra_of
from benchmarks.reproduction.latency_bounds.setting import Setting
from benchmarks.reproduction.latency_bounds.tasks import TASKS
from benchmarks.reproduction.latency_bounds.waa_schedules import waa_of

SECTION = "scheduling cost"
CASES = (("OPT 13B", "S"), ("OPT 13B", "T"), ("GPT-3 39B", "S"), ("GPT-3 101B", "G"))
SAMPLE = 60
PAPER = "3 s to 5 min", "5 h to a day"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--update", type=Path, help="page whose table is replaced")


def run(options: argparse.Namespace) -> None:
    """Print the tables."""
    lines = [*table(), "", *exhaustive()]
    print("\n".join(lines))
    if options.update is not None:
        update_page(options.update, SECTION, lines)


def table() -> Iterator[str]:
    """Yield the lines of the table of costs at the four bounds of each case, one by one."""
    yield (
        "| model, task | kind | schedules | evaluated for a bound | share | CPU s for a bound "
        "| all of them, CPU s |"
    )
    yield "|---" * 7 + "|"
    for name, task in CASES:
        model = next(each for each in MODELS if each.name == name)
        setting = Setting(model, TASKS[task].lengths)
        for kind, made in (("RRA", rra_of), ("WAA", waa_of)):
            evaluated, seconds = [], []
            for bound_s in setting.bounds_s:
                anew = made(setting)
                began_s = time.process_time()
                anew.best(bound_s)
                seconds.append(time.process_time() - began_s)
                evaluated.append(anew.evaluations)
            whole = made(setting)
            count = sum(math.prod(map(len, each.ranges)) for each in whole.layouts)
            share = float(np.mean(evaluated)) / count
            yield (
                f"| {model.label}, {task} | {kind} | {count:,} | {_range(evaluated)} "
                f"| {share:.2%} | {_range(seconds)} | {count * seconds_of_one(whole):,.0f} |"
            )
    yield f"| the paper's models | both | | | | {PAPER[0]} | {PAPER[1]} |"


def exhaustive() -> Iterator[str]:
    """Yield a table of what is found on one layout beside the best of all schedules there."""
    yield "| OPT 13B, S, no groups: bound, s | found | evaluated | best of all | of |"
    yield "|---" * 5 + "|"
    setting = Setting(MODELS[0], TASKS["S"].lengths)
    layout = rra_of(setting).layouts[0]
    assert isinstance(layout, RraSchedules)
    performance = remembered(layout)
    every = [performance(point) for point in product(*layout.ranges)]
    for bound_s in setting.bounds_s:
        anew = RraSchedules(setting, layout.layout, layout.pipeline)
        found = Bounded((anew,)).best(bound_s)
        rates = [each.requests_per_s for each in every if each.keeps(bound_s)]
        bound = f"{bound_s:.1f}" if math.isfinite(bound_s) else "none"
        rate = "NS" if found is None else f"{found.requests_per_s:.2f}"
        best = f"{max(rates):.2f}" if rates else "NS"
        yield f"| {bound} | {rate} | {len(anew.known)} | {best} | {len(every):,} |"


def seconds_of_one(whole: Bounded) -> float:
    """Mean CPU seconds of a schedule, by a sample of those of all layouts."""
    generator = np.random.default_rng(0)
    sizes = np.array([math.prod(map(len, each.ranges)) for each in whole.layouts], dtype=float)
    chosen = generator.choice(len(sizes), size=SAMPLE, p=sizes / sizes.sum())
    began_s = time.process_time()
    for place in chosen.tolist():
        _evaluate_one(whole.layouts[place], generator)
    return (time.process_time() - began_s) / SAMPLE


def _evaluate_one(schedules: Schedules, generator: np.random.Generator) -> None:
    point = tuple(int(generator.choice(each)) for each in schedules.ranges)
    schedules.performance(point)


def _range(values: list[int] | list[float]) -> str:
    """The least and the most of some numbers."""
    low, high = min(values), max(values)
    return f"{low} to {high}" if isinstance(low, int) else f"{low:.1f} to {high:.1f}"
