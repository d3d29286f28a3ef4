"""The interface of integer-programming solvers, and the outcome of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pulp

from quant.common.errors import SpecError

ABSOLUTE_GAP = 1e-8  # in a scaled model's units, where the objective is about 10


class SolverUnavailableError(SpecError):
    """A known solver that is not installed, or whose licence does not cover the model."""


@dataclass(frozen=True)
class SolverLimits:
    """Limits at which a solver may stop: relative gap, and seconds (None: no limit)."""

    relative_gap: float
    time_limit_s: float | None


@dataclass(frozen=True)
class SolverOutcome:
    """The end of a solver's run; `bound` is a lower bound in model units, None if the solver has
    none.

    Where `has_point` is true, the model's variables hold the best point found.
    """

    status: Literal["optimal", "infeasible", "time_limit"]
    has_point: bool
    bound: float | None


@dataclass(frozen=True)
class Solver:
    """One solver: made, run and read by these functions; `remedy` is what to do where it is not
    available.
    """

    create: Callable[[SolverLimits], pulp.LpSolver]
    run: Callable[[pulp.LpProblem, pulp.LpSolver], None]
    read: Callable[[pulp.LpProblem], SolverOutcome]
    remedy: str


def run_model(model: pulp.LpProblem, backend: pulp.LpSolver) -> None:
    """Run a solver that needs no more than PuLP's call."""
    model.solve(backend)


def read_status(model: pulp.LpProblem, bound: float | None) -> SolverOutcome:
    """Read PuLP's two statuses."""
    if model.status == pulp.LpStatusInfeasible:
        return SolverOutcome("infeasible", has_point=False, bound=None)
    if model.sol_status == pulp.LpSolutionOptimal:
        return SolverOutcome("optimal", has_point=True, bound=bound)
    has_point = model.sol_status == pulp.LpSolutionIntegerFeasible
    return SolverOutcome("time_limit", has_point, bound)
