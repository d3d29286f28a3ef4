"""The optimisation core of LLM-PQ section 4.3 as pure functions on arrays.

`AssignmentProblem` says what layers cost on each stage, `solve` finds which go where at which
bitwidth, `evaluate` prices any assignment.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planner.optimiser.auto import solve_automatically
from planner.optimiser.capacity import explain_infeasible
from planner.optimiser.heuristics.adabits import solve_adabits
from planner.optimiser.heuristics.pipeedge import solve_pipeedge
from planner.optimiser.heuristics.transfer import solve_by_transfer
from planner.optimiser.heuristics.uniform import solve_uniform
from planner.optimiser.milp.method import solve_exactly
from planner.optimiser.milp.relaxation import lower_bound
from planner.optimiser.milp.solvers import DEFAULT_SOLVER, SOLVERS
from planner.optimiser.problem import (
    Assignment,
    AssignmentProblem,
    Objective,
    PhaseSeconds,
    StageTimes,
    Status,
    evaluate,
    stage_times,
)
from planner.optimiser.solve_options import SolveOptions
from quant.common.errors import SpecError

__all__ = [
    "METHODS",
    "Assignment",
    "AssignmentProblem",
    "Objective",
    "PhaseSeconds",
    "StageTimes",
    "Status",
    "evaluate",
    "explain_infeasible",
    "lower_bound",
    "solve",
    "stage_times",
]


METHODS: dict[str, Callable[[AssignmentProblem, SolveOptions], Assignment]] = {
    "auto": solve_automatically,
    "ilp": solve_exactly,
    "transfer": solve_by_transfer,
    "adabits": solve_adabits,
    "uniform": lambda problem, options: solve_uniform(problem, options.clock),
    "pipeedge": lambda problem, options: solve_pipeedge(problem, options.clock),
}


def solve(
    problem: AssignmentProblem,
    method: str = "auto",
    solver: str = DEFAULT_SOLVER,
    time_limit_s: float | None = None,
    relative_gap: float = 1e-4,
    upper_bound: float = math.inf,
) -> Assignment:
    """Assign layers to stages and bitwidths.

    `method` is a key of `METHODS`: "auto" searches exactly without an integer programme, unless
    `solver` names another solver than HiGHS, "ilp" solves one with `solver`, one of
    `planner.optimiser.milp.solvers.SOLVERS`, "transfer" is the heuristic of LLM-PQ Alg. 2, the
    others are the paper's baselines. The exact methods stop when the objective is proven within
    `relative_gap` (status "optimal"), when `time_limit_s` wall seconds are over ("time_limit", with
    the best assignment so far), or when nothing beats `upper_bound` seconds by more than the gap
    ("cutoff", without an assignment). Raises InfeasibleError where nothing fits, SpecError for
    options that cannot be used.
    """
    if method not in METHODS:
        raise SpecError(f"method {method!r} is unknown; choose one of {', '.join(METHODS)}")
    if not 0 <= relative_gap < 1:
        raise SpecError(f"relative gap is {relative_gap}; give 0 or more, below 1")
    if time_limit_s is not None and not time_limit_s > 0:
        raise SpecError(f"time limit is {time_limit_s} s; give more than 0, or none")
    if math.isnan(upper_bound):
        raise SpecError("upper bound is not a number; give seconds, or none")
    if solver not in SOLVERS:
        raise SpecError(f"solver {solver!r} is unknown; choose one of {', '.join(SOLVERS)}")
    if method == "auto" and solver != DEFAULT_SOLVER:
        method = "ilp"
    options = SolveOptions(solver, time_limit_s, relative_gap, upper_bound)
    return METHODS[method](problem, options)
