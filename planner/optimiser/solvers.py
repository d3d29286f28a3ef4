"""The solvers that an integer programme can be handed to: one entry of `SOLVERS` each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import pulp

from quant.common.errors import SpecError

ABSOLUTE_GAP = 1e-8  # in a scaled model's units, where the objective is about 10


class SolverUnavailableError(SpecError):
    """A known solver that is not installed, or whose licence does not cover the model."""


@dataclass(frozen=True)
class SolverOutcome:
    """The end of a run; `bound` in model units, None if unknown. Variables hold the point."""

    status: Literal["optimal", "infeasible", "time_limit"]
    has_point: bool
    bound: float | None


class Solver(NamedTuple):
    """One solver: made for a relative gap and a time limit in seconds, and run on a model."""

    create: Callable[[float, float | None], pulp.LpSolver]
    run: Callable[[pulp.LpProblem, pulp.LpSolver], SolverOutcome]
    remedy: str  # where it is not available


def solve_model(
    model: pulp.LpProblem, solver: str, relative_gap: float, time_limit_s: float | None
) -> SolverOutcome:
    """Solve `model` in place; SpecError for a solver unknown, not installed or not licensed."""
    entry = require_solver(solver)
    outcome = entry.run(model, entry.create(relative_gap, time_limit_s))
    if outcome.bound is None and outcome.status == "optimal":
        proven = float(model.objective.value()) * (1 - relative_gap) - ABSOLUTE_GAP
        return replace(outcome, bound=proven)
    return outcome


def require_known(solver: str) -> Solver:
    if solver not in SOLVERS:
        raise SpecError(f"solver {solver!r} is unknown; choose one of {', '.join(SOLVERS)}")
    return SOLVERS[solver]


def require_solver(solver: str) -> Solver:
    """Look a solver up; SpecError if there is none of that name or it is not installed."""
    entry = require_known(solver)
    if not entry.create(0.0, None).available():
        raise SolverUnavailableError(
            f"solver {solver!r} is not available; {entry.remedy}, or use 'highs'"
        )
    return entry


def _outcome(model: pulp.LpProblem, bound: float | None) -> SolverOutcome:
    if model.status == pulp.LpStatusInfeasible:
        return SolverOutcome("infeasible", has_point=False, bound=None)
    if model.sol_status == pulp.LpSolutionOptimal:
        return SolverOutcome("optimal", has_point=True, bound=bound)
    has_point = model.sol_status == pulp.LpSolutionIntegerFeasible
    return SolverOutcome("time_limit", has_point, bound)


def _highs(relative_gap: float, time_limit_s: float | None) -> pulp.LpSolver:
    return pulp.HiGHS(msg=False, gapRel=relative_gap, gapAbs=ABSOLUTE_GAP, timeLimit=time_limit_s)


def _run_highs(model: pulp.LpProblem, backend: pulp.LpSolver) -> SolverOutcome:
    model.solve(backend)
    return _outcome(model, float(model.solverModel.getInfo().mip_dual_bound))


def _cbc(relative_gap: float, time_limit_s: float | None) -> pulp.LpSolver:
    options = {
        "msg": False,
        "gapRel": relative_gap,
        "gapAbs": ABSOLUTE_GAP,
        "timeLimit": time_limit_s,
    }
    system = pulp.COIN_CMD(**options)
    if system.available():
        return system
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 4 will bring none
        return pulp.PULP_CBC_CMD(**options)


def _run_cbc(model: pulp.LpProblem, backend: pulp.LpSolver) -> SolverOutcome:
    model.solve(backend)
    return _outcome(model, None)


def _gurobi(relative_gap: float, time_limit_s: float | None) -> pulp.LpSolver:
    return pulp.GUROBI(
        msg=False,
        timeLimit=time_limit_s,
        OutputFlag=0,  # first, or the other two are printed
        MIPGap=relative_gap,  # Gurobi's own name: PuLP passes no gap of zero on
        MIPGapAbs=ABSOLUTE_GAP,
    )


def _run_gurobi(model: pulp.LpProblem, backend: pulp.LpSolver) -> SolverOutcome:
    import gurobipy  # an optional extra

    try:
        model.solve(backend)
    except gurobipy.GurobiError as error:
        raise SolverUnavailableError(
            f"gurobi refused a model of {model.numVariables()} variables and "
            f"{model.numConstraints()} constraints: {error}; install a full licence "
            "(the one from the registry allows 2000 of each) or use solver 'highs'"
        ) from error
    native = model.solverModel
    if model.status == pulp.LpStatusNotSolved:  # also after a time limit with a point
        return SolverOutcome("time_limit", native.SolCount > 0, float(native.ObjBound))
    return _outcome(model, float(native.ObjBound) if model.status == pulp.LpStatusOptimal else None)


SOLVERS = {
    "highs": Solver(_highs, _run_highs, "install highspy"),
    "gurobi": Solver(_gurobi, _run_gurobi, "install gurobipy and a licence"),
    "cbc": Solver(_cbc, _run_cbc, "install the cbc program"),
}
