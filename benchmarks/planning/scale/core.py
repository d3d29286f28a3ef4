"""Problems of LLM-PQ's clusters, each of one device order and one pair of micro-batch sizes, solved
to a gap of 1e-7 by the exact method and by HiGHS.

*Staircase* is the model of `planner.optimiser.milp` as a whole, which HiGHS solves alone; *ilp* is
the same with boundaries held in windows, as `solve_by("ilp", …)` has it. Three candidates a
cluster: most, middling and least promising. Seconds are CPU seconds of one process; those of the
exact method are the median of three runs. All must agree.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.lab import header, processor_name, show, table_row
from benchmarks.planning.planner import GAP, PAPER, paper_costs, sampled
from planner.optimiser.assignment import SolveOptions, assign_bits
from planner.optimiser.milp import build_model
from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.solve import solve_by
from planner.optimiser.solvers import solve_model
from planner.options import PlanOptions
from planner.search.candidates import Candidates

TIGHT_GAP, TOLERANCE = 1e-7, 1e-6
SAMPLES, TURNS = 3, 3
FEWEST, MOST = 3, 6
"""Devices of an order whose seconds are added up."""


@dataclass(frozen=True)
class Beside:
    """The problems of one cluster, solved in three ways: CPU seconds of each problem.

    `cut`: whether the time limit ended a run on the staircase.
    """

    cluster: int
    stages: int
    layers: int
    exact_s: tuple[float, ...]
    ilp_s: tuple[float, ...]
    staircase_s: tuple[float, ...]
    cut: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what this part is told."""
    parser.add_argument("--clusters", type=int, nargs="+", default=list(PAPER), choices=PAPER)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for HiGHS")
    parser.add_argument("--update", type=Path, help="page whose table is replaced")


def run(options: argparse.Namespace) -> None:
    """Solve and print."""
    show(table([beside(each, options.limit) for each in options.clusters]), options.update, "core")


def beside(number: int, limit_s: float) -> Beside:
    """Solve problems of one cluster in all three ways; stops where they disagree."""
    costs = paper_costs(number, PlanOptions(relative_gap=GAP, head="last"))
    problems = sampled(list(Candidates(costs)), SAMPLES)
    runs = [_timed(problem, limit_s) for problem in problems]
    exact_s, ilp_s, staircase_s, cut = zip(*runs, strict=True)
    first = problems[0]
    return Beside(number, first.stages, first.layers, exact_s, ilp_s, staircase_s, any(cut))


def _timed(problem: AssignmentProblem, limit_s: float) -> tuple[float, float, float, bool]:
    """CPU seconds of the exact method, of `ilp` and of the staircase, and whether that was cut."""
    clock = time.process_time
    exact_s = []
    for _ in range(TURNS):
        began_s = clock()
        found = solve_by("auto", problem, SolveOptions(relative_gap=TIGHT_GAP))
        exact_s.append(clock() - began_s)
    began_s = clock()
    limits = SolveOptions(time_limit_s=limit_s, relative_gap=TIGHT_GAP)
    ilp = solve_by("ilp", problem, limits)
    ilp_s = clock() - began_s
    began_s = clock()
    whole, cut = _staircase(problem, limit_s)
    staircase_s = clock() - began_s
    for other in (ilp.objective, math.inf if cut else whole):
        if other < found.bound * (1 - TOLERANCE) or (
            other < math.inf and found.objective > other * (1 + TOLERANCE)
        ):
            raise SystemExit(f"exact {found.objective}, others {ilp.objective}, {whole}: disagree")
    return median(exact_s), ilp_s, staircase_s, cut


def _staircase(problem: AssignmentProblem, limit_s: float) -> tuple[float, bool]:
    """The objective that HiGHS finds with boundaries anywhere, and whether time was up."""
    anywhere = [(1, problem.layers - 1)] * (problem.stages - 1)
    model = build_model(problem, anywhere, 0.0, None, np.ones(problem.stages))
    outcome = solve_model(model.programme, "highs", TIGHT_GAP, limit_s)
    if not outcome.has_point:
        return math.inf, True
    found = assign_bits(problem, model.counts_found())
    return found.objective, outcome.status != "optimal"


def table(rows: Sequence[Beside]) -> Iterator[str]:
    yield header("cluster | stages, layers | exact (CPU s) | ilp | staircase | exact / staircase")
    for row in rows:
        cells = (
            row.cluster,
            f"{row.stages}, {row.layers}",
            ", ".join(f"{each:.3f}" for each in row.exact_s),
            ", ".join(f"{each:.2f}" for each in row.ilp_s),
            "≥ " * row.cut + ", ".join(f"{each:.2f}" for each in row.staircase_s),
            f"1 / {sum(row.staircase_s) / sum(row.exact_s):.0f}",
        )
        yield table_row(cells)
    several = [row for row in rows if FEWEST <= row.stages <= MOST]
    if several:
        exact, ilp, whole = (
            sum(sum(getattr(row, name)) for row in several)
            for name in ("exact_s", "ilp_s", "staircase_s")
        )
        yield ""
        yield (
            f"Of {FEWEST} to {MOST} devices together: {exact:.2f} CPU seconds, ilp {ilp:.1f} "
            f"(1 / {ilp / exact:.0f}), staircase {whole:.1f} (1 / {whole / exact:.0f}); "
            f"{processor_name()}."
        )
