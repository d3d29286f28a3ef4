"""The solvers that an integer programme can be handed to, by name."""

from __future__ import annotations

from dataclasses import replace

import pulp

from planner.optimiser.milp.solvers.cbc import CBC
from planner.optimiser.milp.solvers.gurobi import GUROBI
from planner.optimiser.milp.solvers.highs import HIGHS
from planner.optimiser.milp.solvers.solver import (
    ABSOLUTE_GAP,
    Solver,
    SolverLimits,
    SolverOutcome,
    SolverUnavailableError,
)
from quant.common.errors import SpecError

SOLVERS: dict[str, Solver] = {"highs": HIGHS, "gurobi": GUROBI, "cbc": CBC}


def solve_model(model: pulp.LpProblem, solver: str, limits: SolverLimits) -> SolverOutcome:
    """Solve `model` in place; SpecError for a solver unknown, not installed or not licensed."""
    entry = require_solver(solver)
    entry.run(model, entry.create(limits))
    outcome = entry.read(model)
    if outcome.bound is None and outcome.status == "optimal":
        proven = float(model.objective.value()) * (1 - limits.relative_gap) - ABSOLUTE_GAP
        return replace(outcome, bound=proven)
    return outcome


def require_known(solver: str) -> Solver:
    """Look a solver up; SpecError if there is none of that name."""
    if solver not in SOLVERS:
        raise SpecError(f"solver {solver!r} is unknown; choose one of {', '.join(SOLVERS)}")
    return SOLVERS[solver]


def require_solver(solver: str) -> Solver:
    """Look a solver up; SpecError if there is none of that name or it is not installed."""
    entry = require_known(solver)
    if not entry.create(SolverLimits(0.0, None)).available():
        raise SolverUnavailableError(
            f"solver {solver!r} is not available; {entry.remedy}, or use 'highs'"
        )
    return entry
