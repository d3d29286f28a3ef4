"""adabits of LLM-PQ section 6.9: the best quality that memory allows, whatever the latency.

It is the ILP of eq. 4 without its latency terms, a baseline and the start of bitwidth transfer
(Alg. 2, line 1). Among plans of equal quality the fastest is taken.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.optimiser.assignment import Assignment, evaluate, stage_times
from planner.optimiser.bit_assignment import smallest_candidate
from planner.optimiser.boxes.method import solve_by_boxes
from planner.optimiser.capacity import require_feasible
from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.relaxation.relax import relax
from planner.optimiser.sensitivity_tables import SensitivityTables
from planner.optimiser.solve_options import SolveOptions

QUALITY_WEIGHT = 1e4  # quality counts so many times the latency


def solve_adabits(
    problem: AssignmentProblem, options: SolveOptions, tables: SensitivityTables | None = None
) -> Assignment:
    """The plan of least summed sensitivity, within the gap; status "adabits".

    Objective and bound are those of `problem` itself. Raises InfeasibleError where nothing fits.
    """
    require_feasible(problem)
    start = options.clock()
    found = solve_by_boxes(_quality_first(problem), replace(options, upper_bound=np.inf), tables)
    objective = evaluate(problem, found.first_layer, found.bitwidth)
    bound = min(objective, relax(problem).bound)
    return replace(
        found,
        objective=objective,
        bound=bound,
        status="adabits",
        seconds=options.clock() - start,
    )


def _quality_first(problem: AssignmentProblem) -> AssignmentProblem:
    """The problem with a theta at which the latency only decides between equal qualities.

    The weight is on the quality that a step between bitwidths is worth on average.
    """
    losses = problem.sensitivity
    spread = float(losses.max(axis=1).sum() - losses.min(axis=1).sum())
    if spread <= 0:
        return problem
    some = smallest_candidate(problem)
    latency_s = stage_times(problem, some.first_layer, some.bitwidth).latency_s
    return replace(problem, theta=QUALITY_WEIGHT * max(latency_s, 1e-12) / spread)
