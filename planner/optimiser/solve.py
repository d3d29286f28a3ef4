"""Solving one assignment problem by a method of the table: the face of the optimiser.

`AssignmentProblem` says what layers cost on each stage, `solve` finds which go where at which
bitwidth (LLM-PQ section 4.3), `planner.optimiser.assignment.evaluate` prices any assignment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from planner.optimiser.assignment import Assignment, SolveOptions
from planner.optimiser.boxes import solve_by_boxes
from planner.optimiser.milp import solve_exactly
from planner.optimiser.names import DEFAULT_SOLVER
from planner.optimiser.one_bitwidth import pipeedge_assignment, solve_bounded, uniform_assignment
from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.sensitivity_tables import SensitivityTables
from planner.optimiser.solvers import require_known
from planner.optimiser.transfer import improve_by_transfer, solve_adabits, solve_by_transfer
from quant.common.errors import SpecError

TRANSFER_SHARE = 0.2  # of a time limit, kept for the heuristic


def solve(
    problem: AssignmentProblem,
    method: str = "auto",
    solver: str = DEFAULT_SOLVER,
    time_limit_s: float | None = None,
    relative_gap: float = 1e-4,
    upper_bound: float = math.inf,
) -> Assignment:
    """Assign layers to stages and bitwidths by a `method` of `METHODS`; "auto" searches exactly
    without an integer programme, unless `solver` names another than HiGHS. Exact methods stop when
    proven within `relative_gap` ("optimal"), out of time ("time_limit"), or when nothing beats
    `upper_bound` seconds by the gap ("cutoff", no assignment). InfeasibleError where nothing fits,
    SpecError for options that cannot be used.
    """
    return solve_by(method, problem, SolveOptions(solver, time_limit_s, relative_gap, upper_bound))


def solve_by(
    method: str,
    problem: AssignmentProblem,
    options: SolveOptions,
    tables: SensitivityTables | None = None,
) -> Assignment:
    """Solve as `solve` does; `tables` of the problem's sensitivity may be handed in."""
    if method not in METHODS:
        raise SpecError(f"method {method!r} is unknown; choose one of {', '.join(METHODS)}")
    require_known(options.solver)
    if method == "auto" and options.solver != DEFAULT_SOLVER:
        method = "ilp"
    return METHODS[method](problem, options, tables or SensitivityTables(problem.sensitivity))


def solve_automatically(
    problem: AssignmentProblem, options: SolveOptions, tables: SensitivityTables
) -> Assignment:
    """Exact search to within the gap; out of time, the best found after bitwidth transfer, with its
    bound.
    """
    if options.time_limit_s is None:
        return solve_by_boxes(problem, options, tables)
    kept_s = TRANSFER_SHARE * options.time_limit_s
    shorter = replace(options, time_limit_s=options.time_limit_s - kept_s)
    found = solve_by_boxes(problem, shorter, tables)
    if found.status != "time_limit":
        return found
    start_s = options.clock()
    better = improve_by_transfer(problem, found, replace(options, time_limit_s=kept_s), tables)
    bound = min(found.bound, better.objective)
    seconds = found.seconds + options.clock() - start_s
    return replace(better, bound=bound, status="time_limit", seconds=seconds)


METHODS: dict[str, Callable[[AssignmentProblem, SolveOptions, SensitivityTables], Assignment]] = {
    "auto": solve_automatically,
    "ilp": lambda problem, options, _: solve_exactly(problem, options),
    "transfer": solve_by_transfer,
    "adabits": solve_adabits,
    "uniform": lambda problem, options, _: solve_bounded(uniform_assignment, problem, options),
    "pipeedge": lambda problem, options, _: solve_bounded(pipeedge_assignment, problem, options),
}
"""`planner.optimiser.names` says what they are; the tables of a sensitivity serve many problems."""
