"""Bitwidth transfer (LLM-PQ Alg. 2): from adabits, relieve the slowest stage step by step.

Rounds of steps are judged by p-norms over stages that come ever nearer to the maximum; the best
plan of all rounds counts, so that the result is never worse than the start.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from planner.optimiser.assignment import Assignment
from planner.optimiser.bit_assignment import Candidate, assign_bits
from planner.optimiser.heuristics.adabits import solve_adabits
from planner.optimiser.heuristics.transfer_steps import TransferSteps
from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.relaxation.relax import relax
from planner.optimiser.sensitivity_tables import SensitivityTables
from planner.optimiser.solve_options import SolveOptions

NORMS = (8.0, 32.0, math.inf)
LEAST_GAIN = 1e-9  # relative; below it a step is rounding


def solve_by_transfer(
    problem: AssignmentProblem, options: SolveOptions, tables: SensitivityTables | None = None
) -> Assignment:
    """The transferred plan, status "transfer", with the linear relaxation's bound.

    Stops early when the time limit is over. Raises InfeasibleError where nothing fits.
    """
    start = options.clock()
    tables = tables or SensitivityTables(problem.sensitivity)
    half = None if options.time_limit_s is None else options.time_limit_s / 2
    begin = solve_adabits(problem, replace(options, time_limit_s=half), tables)
    given = Candidate(begin.first_layer, begin.bitwidth, begin.objective)
    best = improve_by_transfer(problem, given, replace(options, time_limit_s=half), tables)
    bound = min(best.objective, relax(problem).bound)
    seconds = options.clock() - start
    return Assignment(best.first_layer, best.bitwidth, best.objective, bound, "transfer", seconds)


def improve_by_transfer(
    problem: AssignmentProblem, begin: Candidate, options: SolveOptions, tables: SensitivityTables
) -> Candidate:
    """Improve `begin` by Alg. 2, lines 4 to 23; the result is never worse."""
    started = options.clock()
    counts = np.zeros_like(problem.available, dtype=np.int64)
    for stage, (first, stop) in enumerate(itertools.pairwise(begin.first_layer)):
        np.add.at(counts[stage], list(begin.bitwidth[first:stop]), 1)
    best = begin
    for norm in NORMS:
        steps = TransferSteps(problem, tables, norm)
        merit = steps.merit(counts)
        while options.time_limit_s is None or options.clock() - started < options.time_limit_s:
            step = steps.best(counts, merit * (1 - LEAST_GAIN))
            if step is None:
                break
            counts, merit = step.counts, step.merit
        best = min(best, assign_bits(problem, counts), key=lambda plan: plan.objective)
    return best
