"""Tokens per second of plans for whole jobs: the default, 32 in flight, and the paper's baselines.

    python -m benchmarks.planning.job_plan [--cases 1 2 3 qwen2.5-14b] [--lengths alike short real]
                                  [--sweep 1.2] [--update docs/planner.md]

Jobs of 3,000 prompts on LLM-PQ's 11 clusters and on three clusters with models of today. Lengths
are all alike (512 prompt tokens, 100 new ones; `short`: 200 and 100), or `real`: prompts of
conversations and answers of Vicuna-13B from `--data` (those files are no part of the project;
without them lengths are lognormal around the same medians). Costs are the planner's own: rooflines.

- default: prompts in flight as the planner decides, quality balanced;
- 32 in flight: the plan for one batch of 32 of the longest rows (theta 1, or LLM-PQ's table 9), run
  over the job with its slots refilled: what users got before;
- Uniform, PipeEdge, FlexGen-like (the better of 16 and 8 bit): each at its best number in flight.

With `--sweep RATIO` the default is held against our own plans at fixed numbers in flight, each
RATIO times the one before (1.03: all to 33, then finer than 3 %; takes long), by tokens/s alone
(fast) and by seconds and theta times the sensitivity (balanced), at the same theta.

Predictions are held against simulations of jobs of 20 times the slots, whose rows are drawn anew.

CPU seconds are of planning with all that stands beside a plan.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.machine import processor_name
from benchmarks.planning.job_cases import (
    ALIKE,
    KINDS,
    LOGNORMAL,
    PROMPTS,
    REAL,
    SHORT,
    RowLengths,
    geometric_mean,
    settings,
)
from benchmarks.planning.job_contestants import BASELINES, Contest, Figures
from benchmarks.planning.planner import update_page
from benchmarks.reproduction.paper_tables import DATA

BEFORE = "32 in flight"
SECTION = "jobs"
HEADS = ("cluster", "model", "default", BEFORE, *BASELINES, "ratios", "plan (CPU s)", "gap")


def contest_table(contests: Sequence[Contest]) -> Iterator[str]:
    """Markdown rows: `in flight x bits: tokens/s` of each contestant, and the default's ratios."""
    yield f"| {' | '.join(HEADS)} |"
    yield "|---" * len(HEADS) + "|"
    ratios: dict[str, list[float]] = {name: [] for name in (BEFORE, *BASELINES)}
    seconds = 0.0
    for contest in contests:
        default = contest.default
        others = {BEFORE: contest.before(), **contest.baselines()}
        own = {
            name: default.tokens_per_s / found.tokens_per_s if found else None
            for name, found in others.items()
        }
        for name, ratio in own.items():
            if ratio is not None:
                ratios[name].append(ratio)
        seconds += contest.cpu_s
        cells = (
            contest.setting.name,
            contest.setting.model,
            _shown(default),
            *map(_shown, others.values()),
            ", ".join("–" if ratio is None else f"{ratio:.2f}" for ratio in own.values()),
            f"{contest.cpu_s:.1f}",
            f"{contest.plan.solver.gap:.0e}",
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    means = (
        f"{geometric_mean(found):.2f} times {name} ({len(found)} of {len(contests)} fit)"
        for name, found in ratios.items()
    )
    yield f"Geometric means: {', '.join(means)}. Planning took {seconds:.0f} CPU s in all."


def _shown(found: Figures | None) -> str:
    if found is None:
        return "does not fit"
    return f"{found.in_flight} x {found.bits} bit: {found.tokens_per_s:.0f}"


def sweep_table(contests: Sequence[Contest], step: float) -> Iterator[str]:
    """Markdown rows: the default's number in flight beside the best of the sweep."""
    yield (
        "| cluster | model | quality | default | best of sweep | tried | default behind, simulated "
        "| by the closed form |"
    )
    yield "|---" * 8 + "|"
    worst = closed_worst = 0.0
    for contest in contests:
        for quality in ("fast", "balanced"):
            found = contest.swept(quality, step)
            worst = max(worst, found.behind)
            closed_worst = max(closed_worst, found.closed_behind)
            cells = (
                contest.setting.name,
                contest.setting.model,
                quality,
                found.in_flight,
                found.best_in_flight,
                found.tried,
                f"{100 * found.behind:+.2f} %",
                f"{100 * found.closed_behind:+.2f} %",
            )
            yield f"| {' | '.join(map(str, cells))} |"
    yield ""
    yield (
        f"Numbers in flight at most {step:g} times the one before. The default is at most "
        f"{100 * worst:.2f} % behind the best of the sweep, {100 * closed_worst:.2f} % by the "
        "closed form that is minimised."
    )


def check_table(contests: Sequence[Contest]) -> Iterator[str]:
    """Markdown rows: errors of the predicted tokens/s."""
    yield "| cluster | model | closed form | forecast of the plan |"
    yield "|---" * 4 + "|"
    closed, forecast = [], []
    for contest in contests:
        found = contest.checked()
        closed.append(found.closed_error)
        forecast.append(found.forecast_error)
        yield (
            f"| {contest.setting.name} | {contest.setting.model} | "
            f"{100 * found.closed_error:+.2f} % | {100 * found.forecast_error:+.2f} % |"
        )
    yield ""
    worst = (100 * max(map(abs, errors)) for errors in (closed, forecast))
    yield f"At most {next(worst):.2f} % and {next(worst):.2f} %."


def predicted(options: argparse.Namespace) -> Iterator[str]:
    """The three tables of every kind of lengths."""
    for kind in options.lengths:
        lengths = RowLengths(kind, options.data)
        contests = [Contest(each, lengths, PROMPTS) for each in settings(options.cases)]
        yield ""
        yield f"Lengths {kind}, {PROMPTS:,} prompts, predicted:"
        yield ""
        yield from contest_table(contests)
        yield ""
        yield "Predictions less simulations of jobs of 20 times the slots with other rows:"
        yield ""
        yield from check_table(contests)
        if options.sweep:
            yield ""
            yield from sweep_table(contests, options.sweep)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables that are asked for, and update a page if asked to."""
    options = read_options(arguments)
    lines = []
    for line in _lines(options):
        lines.append(line)
        print(line, flush=True)
    if options.update is not None:
        update_page(options.update, SECTION, lines)


def _lines(options: argparse.Namespace) -> Iterator[str]:
    """What is printed: between the markers of its section, unless a page is updated."""
    if options.update is None:
        yield f"<!-- {SECTION} -->"
    yield f"{processor_name()}."
    yield from predicted(options)
    if options.update is None:
        yield f"<!-- end of {SECTION} -->"


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `lengths` are those that can be had."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=[], help="numbers of clusters, and models")
    parser.add_argument("--lengths", nargs="+", default=[ALIKE, SHORT, REAL], choices=KINDS)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the reference data")
    parser.add_argument("--sweep", type=float, nargs="?", const=1.2, help="ratio of its numbers")
    parser.add_argument("--update", type=Path, help="page whose section is replaced")
    options = parser.parse_args(arguments)
    if options.sweep is not None and options.sweep <= 1:
        parser.error(f"--sweep {options.sweep:g}: give a ratio above 1, such as 1.2")
    if REAL in options.lengths and not options.data.is_dir():
        print(f"{options.data} is not there: lengths are lognormal", file=sys.stderr)
        options.lengths = [LOGNORMAL if kind == REAL else kind for kind in options.lengths]
    return options


if __name__ == "__main__":
    main()
