"""Solving one assignment problem by a method of the table: the face of the optimiser.

`AssignmentProblem` says what layers cost on each stage, `solve` finds which go where at which
bitwidth (LLM-PQ section 4.3), `planner.optimiser.assignment.evaluate` prices any assignment.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planner.optimiser.assignment import Assignment
from planner.optimiser.automatic import solve_automatically
from planner.optimiser.heuristics.adabits import solve_adabits
from planner.optimiser.heuristics.pipeedge import solve_pipeedge
from planner.optimiser.heuristics.transfer import solve_by_transfer
from planner.optimiser.heuristics.uniform import solve_uniform
from planner.optimiser.milp.method import solve_exactly
from planner.optimiser.milp.solvers.table import require_known
from planner.optimiser.names import DEFAULT_SOLVER
from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.sensitivity_tables import SensitivityTables
from planner.optimiser.solve_options import SolveOptions
from quant.common.errors import SpecError

Method = Callable[[AssignmentProblem, SolveOptions, SensitivityTables], Assignment]
"""A way to solve one problem; the tables of its sensitivity serve many problems."""

METHODS: dict[str, Method] = {
    "auto": solve_automatically,
    "ilp": lambda problem, options, _: solve_exactly(problem, options),
    "transfer": solve_by_transfer,
    "adabits": solve_adabits,
    "uniform": lambda problem, options, _: solve_uniform(problem, options),
    "pipeedge": lambda problem, options, _: solve_pipeedge(problem, options),
}
"""`planner.optimiser.names` says what they are."""


def solve(
    problem: AssignmentProblem,
    method: str = "auto",
    solver: str = DEFAULT_SOLVER,
    time_limit_s: float | None = None,
    relative_gap: float = 1e-4,
    upper_bound: float = math.inf,
) -> Assignment:
    """Assign layers to stages and bitwidths.

    `method` is a key of `METHODS`; "auto" searches exactly without an integer programme, unless
    `solver` names another solver than HiGHS. `solver` is one of
    `planner.optimiser.milp.solvers.table.SOLVERS`. The exact methods stop when the objective is
    proven within `relative_gap` (status "optimal"), when `time_limit_s` wall seconds are over
    ("time_limit", with the best assignment so far), or when nothing beats `upper_bound` seconds by
    more than the gap ("cutoff", without an assignment). Raises InfeasibleError where nothing fits,
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
