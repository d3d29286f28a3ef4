"""Tokens per second of plans for whole jobs: the default, 32 in flight, and the paper's baselines.

    python -m benchmarks.planning.job_plan [--cases 1 2 3 qwen2.5-14b] [--lengths alike short real]

Jobs of 3,000 prompts on LLM-PQ's 11 clusters and on three clusters with models of today. Lengths
are all alike (512 prompt tokens, 100 new ones; `short`: 200 and 100), or `real`: prompts of
conversations and answers of Vicuna-13B from `--data` (those files are no part of the project;
without them lengths are lognormal around the same medians). Costs are the planner's own: rooflines.

- default: prompts in flight as the planner decides, quality balanced;
- 32 in flight: the plan for one batch of 32 of the longest rows (theta 1, or LLM-PQ's table 9), run
  over the job with its slots refilled: what users got before;
- Uniform, PipeEdge, FlexGen-like (the better of 16 and 8 bit): each at its best number in flight.

Predictions are held against simulations of jobs of 20 times the slots, whose rows are drawn anew.

CPU seconds are of planning with all that stands beside a plan.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from benchmarks.lab import header, processor_name, show, table_row
from benchmarks.planning.job_cases import (
    ALIKE,
    KINDS,
    LOGNORMAL,
    PROMPTS,
    REAL,
    SHORT,
    RowLengths,
    Setting,
    best_number,
    geometric_mean,
    settings,
)
from benchmarks.reproduction.paper_tables import DATA
from planner.costs.model import CostModel
from planner.explanation.planned_assignment import PlannedAssignment, planned_assignment
from planner.optimiser.assignment import stage_times
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.schedule.passes import JobRows
from planner.search.baselines import baseline
from planner.search.find import PricedPlan, find_plan
from planner.search.request import PlanningRequest, costs_of
from planner.simulation.job_simulation import simulate_job, simulate_job_assignment
from planner.workload import Job
from quant.common.errors import InfeasibleError

BEFORE_IN_FLIGHT = 32
FLEXGEN = ("flexgen", "flexgen-int8")
BASELINES: dict[str, tuple[str, ...]] = {
    "Uniform": ("uniform",),
    "PipeEdge": ("pipeedge",),
    "FlexGen-like": FLEXGEN,
}
"""The planner's names of each; the best of several counts."""
COARSE, FINE = 1.3, 1.02
FILLS = 20
"""How often the slots are filled by the jobs that predictions are held against."""
CHECK_SEED = 1


@dataclass(frozen=True)
class Figures:
    """A contestant: prompts in flight, bits, tokens per second of the whole job."""

    in_flight: int
    bits: str
    tokens_per_s: float


@dataclass(frozen=True)
class Checked:
    """Predicted tokens per second of a job of `FILLS` times the slots, over the simulated ones of
    other rows of the same kind, less one: of the closed form, and of the plan's forecast.
    """

    closed_error: float
    forecast_error: float


@dataclass(frozen=True, eq=False)
class Contest:
    """One job on one cluster."""

    setting: Setting
    lengths: RowLengths
    prompts: int

    @cached_property
    def job(self) -> Job:
        return self.lengths.job(self.prompts)

    @cached_property
    def _timed(self) -> tuple[PricedPlan, float]:
        began = time.process_time()
        setting = self.setting
        found = find_plan(setting.cluster, setting.shape, setting.model, self.job, PlanOptions())
        return found, time.process_time() - began

    @property
    def plan(self) -> PlanSpec:
        return self._timed[0].plan

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the default plan took, with all that stands beside it."""
        return self._timed[1]

    @property
    def default(self) -> Figures:
        return figures(self.plan)

    @cached_property
    def before_plan(self) -> PlanSpec | None:
        """The plan for a batch of 32 of the longest rows; None where it does not fit."""
        setting, batch = self.setting, self.job.in_flight(BEFORE_IN_FLIGHT)
        options = PlanOptions(theta=setting.theta)
        try:
            return find_plan(setting.cluster, setting.shape, setting.model, batch, options).plan
        except InfeasibleError:
            return None

    def before(self) -> Figures | None:
        """The figures of that plan when the job is run with it, its slots refilled."""
        plan, setting = self.before_plan, self.setting
        if plan is None:
            return None
        options = PlanOptions(theta=setting.theta)
        costs, _ = costs_of(PlanningRequest(setting.cluster, setting.shape, plan.workload, options))
        placed = _with_job(planned_assignment(plan, costs), self.job)
        run = simulate_job_assignment(placed.pass_table, placed.sizes)
        return Figures(plan.workload.global_batch, bits_of(plan), run.tokens_per_s)

    def baselines(self) -> Mapping[str, Figures | None]:
        """Each baseline at its own best number in flight; None where it never fits."""
        return {name: self._baseline(kinds) for name, kinds in BASELINES.items()}

    def _baseline(self, kinds: tuple[str, ...]) -> Figures | None:
        costs, found = self._costs(PlanOptions(), 1), []
        for kind in kinds:

            def rate(number: int, kind: str = kind) -> float | None:
                return baseline(_in_flight(costs, number), kind).tokens_per_s

            best = best_number(rate, self.prompts, COARSE, FINE)
            if best is not None:
                chosen = baseline(_in_flight(costs, best[0]), kind)
                bits = str(chosen.bitwidth or "mixed")
                found.append(Figures(best[0], bits, best[1]))
        return max(found, key=lambda each: each.tokens_per_s, default=None)

    def checked(self) -> Checked:
        """The predictions for a job of `FILLS` times the slots against one of other rows."""
        found, plan = self._timed[0], self.plan
        slots = plan.workload.global_batch
        job = self.lengths.job(FILLS * slots)
        placed = _with_job(planned_assignment(plan, found.costs), job)
        problem = placed.costs.problem(placed.devices, placed.sizes)
        closed_s = stage_times(problem, placed.first_layer, placed.bitwidth).latency_s
        table = placed.pass_table
        planned = simulate_job_assignment(table, placed.sizes)
        pairs = self.lengths.draw(FILLS * slots, CHECK_SEED)
        prompts, outputs = zip(*pairs, strict=True)
        rows = JobRows(prompts, outputs)
        run, *_ = simulate_job(rows, slots, placed.sizes, table.stages, table.seconds)
        return Checked(
            job.output_tokens / closed_s / run.tokens_per_s - 1,
            planned.tokens_per_s / run.tokens_per_s - 1,
        )

    def _costs(self, options: PlanOptions, number: int) -> CostModel:
        setting, workload = self.setting, self.job.in_flight(number)
        return costs_of(
            PlanningRequest(setting.cluster, setting.shape, workload, options, self.job)
        )[0]


def _in_flight(costs: CostModel, number: int) -> CostModel:
    assert costs.job is not None, "costs of a job"
    return costs.with_in_flight(costs.job, number)


def _with_job(placed: PlannedAssignment, job: Job) -> PlannedAssignment:
    """The same assignment for another job."""
    return replace(placed, costs=replace(placed.costs, job=job))


def figures(plan: PlanSpec) -> Figures:
    """The figures of a job's plan."""
    assert plan.job is not None, "a plan of a job"
    return Figures(plan.workload.global_batch, bits_of(plan), plan.job.tokens_per_s)


def bits_of(plan: PlanSpec) -> str:
    """The one bitwidth of all layers, or their mean to a tenth."""
    counts = Counter(bits for stage in plan.stages for bits in stage.bitwidths)
    mean = sum(bits * count for bits, count in counts.items()) / counts.total()
    return str(next(iter(counts))) if len(counts) == 1 else f"{mean:.1f}"


BEFORE = "32 in flight"
SECTION = "jobs"
HEADS = ("cluster", "model", "default", BEFORE, *BASELINES, "ratios", "plan (CPU s)", "gap")


def contest_table(contests: Sequence[Contest]) -> Iterator[str]:
    """Markdown rows: `in flight x bits: tokens/s` of each contestant, and the default's ratios."""
    yield header(HEADS)
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
        yield table_row(cells)
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


def check_table(contests: Sequence[Contest]) -> Iterator[str]:
    """Markdown rows: errors of the predicted tokens/s."""
    yield header("cluster | model | closed form | forecast of the plan")
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables that are asked for, and update a page if asked to."""
    options = read_options(arguments)
    show(_lines(options), options.update, SECTION)


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
    parser.add_argument("--update", type=Path, help="page whose section is replaced")
    options = parser.parse_args(arguments)
    if REAL in options.lengths and not options.data.is_dir():
        print(f"{options.data} is not there: lengths are lognormal", file=sys.stderr)
        options.lengths = [LOGNORMAL if kind == REAL else kind for kind in options.lengths]
    return options


if __name__ == "__main__":
    main()
