"""The integer-programming solvers a model can be handed to: one entry in `SOLVERS` each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import pulp

from quant.common.errors import SpecError

DEFAULT_SOLVER = "highs"


class SolverUnavailableError(SpecError):
    """A known solver that is not installed, or whose licence does not cover the model."""


ABSOLUTE_GAP = 1e-8  # in a scaled model's units, where the objective is about 10


@dataclass(frozen=True)
class SolverLimits:
    """When a solver may stop: relative gap, and seconds (None: no limit)."""

    relative_gap: float
    time_limit_s: float | None


@dataclass(frozen=True)
class SolverOutcome:
    """How a run ended; `bound` is a lower bound in model units, None if the solver has none.

    Where `has_point` is true, the model's variables hold the best point found.
    """

    status: Literal["optimal", "infeasible", "time_limit"]
    has_point: bool
    bound: float | None


@dataclass(frozen=True)
class Solver:
    """How one solver is made, run, and read; `remedy` is what to do where it is not available."""

    create: Callable[[SolverLimits], pulp.LpSolver]
    run: Callable[[pulp.LpProblem, pulp.LpSolver], None]
    read: Callable[[pulp.LpProblem], SolverOutcome]
    remedy: str


def solve_model(model: pulp.LpProblem, solver: str, limits: SolverLimits) -> SolverOutcome:
    """Solve `model` in place; SpecError for a solver unknown, not installed or not licensed."""
    entry = require_solver(solver)
    entry.run(model, entry.create(limits))
    outcome = entry.read(model)
    if outcome.bound is None and outcome.status == "optimal":
        proven = float(model.objective.value()) * (1 - limits.relative_gap) - ABSOLUTE_GAP
        return replace(outcome, bound=proven)
    return outcome


def require_solver(solver: str) -> Solver:
    """The table's entry; SpecError if there is none or it is not installed."""
    if solver not in SOLVERS:
        raise SpecError(f"solver {solver!r} is unknown; choose one of {', '.join(SOLVERS)}")
    entry = SOLVERS[solver]
    if not entry.create(SolverLimits(0.0, None)).available():
        raise SolverUnavailableError(
            f"solver {solver!r} is not available; {entry.remedy}, or use 'highs'"
        )
    return entry


def _create_highs(limits: SolverLimits) -> pulp.LpSolver:
    return pulp.HiGHS(
        msg=False,
        gapRel=limits.relative_gap,
        gapAbs=ABSOLUTE_GAP,
        timeLimit=limits.time_limit_s,
    )


def _create_cbc(limits: SolverLimits) -> pulp.LpSolver:
    """CBC of the system where there is one, else the one that PuLP brings."""
    options = {
        "msg": False,
        "gapRel": limits.relative_gap,
        "gapAbs": ABSOLUTE_GAP,
        "timeLimit": limits.time_limit_s,
    }
    system = pulp.COIN_CMD(**options)
    if system.available():
        return system
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 4 will bring none
        return pulp.PULP_CBC_CMD(**options)


def _create_gurobi(limits: SolverLimits) -> pulp.LpSolver:
    """Gurobi takes its gaps as parameters: PuLP passes no relative gap of zero on."""
    return pulp.GUROBI(
        msg=False,
        timeLimit=limits.time_limit_s,
        OutputFlag=0,  # first, or the other two are printed
        MIPGap=limits.relative_gap,
        MIPGapAbs=ABSOLUTE_GAP,
    )


def _run(model: pulp.LpProblem, backend: pulp.LpSolver) -> None:
    model.solve(backend)


def _run_gurobi(model: pulp.LpProblem, backend: pulp.LpSolver) -> None:
    """Turn a refused licence or a model above its size into SpecError."""
    import gurobipy  # an optional extra

    try:
        model.solve(backend)
    except gurobipy.GurobiError as error:
        raise SolverUnavailableError(
            f"gurobi refused a model of {model.numVariables()} variables and "
            f"{model.numConstraints()} constraints: {error}; install a full licence "
            "(the one from the registry allows 2000 of each) or use solver 'highs'"
        ) from error


def _status_outcome(model: pulp.LpProblem, bound: float | None) -> SolverOutcome:
    """Read PuLP's two statuses."""
    if model.status == pulp.LpStatusInfeasible:
        return SolverOutcome("infeasible", has_point=False, bound=None)
    if model.sol_status == pulp.LpSolutionOptimal:
        return SolverOutcome("optimal", has_point=True, bound=bound)
    has_point = model.sol_status == pulp.LpSolutionIntegerFeasible
    return SolverOutcome("time_limit", has_point, bound)


def _read_highs(model: pulp.LpProblem) -> SolverOutcome:
    return _status_outcome(model, float(model.solverModel.getInfo().mip_dual_bound))


def _read_cbc(model: pulp.LpProblem) -> SolverOutcome:
    return _status_outcome(model, None)


def _read_gurobi(model: pulp.LpProblem) -> SolverOutcome:
    """PuLP calls a run that hit its time limit unsolved, even with a point: ask Gurobi itself."""
    native = model.solverModel
    if model.status == pulp.LpStatusNotSolved:
        return SolverOutcome("time_limit", native.SolCount > 0, float(native.ObjBound))
    bound = float(native.ObjBound) if model.status == pulp.LpStatusOptimal else None
    return _status_outcome(model, bound)


SOLVERS: dict[str, Solver] = {
    "highs": Solver(_create_highs, _run, _read_highs, "install highspy"),
    "gurobi": Solver(_create_gurobi, _run_gurobi, _read_gurobi, "install gurobipy and a licence"),
    "cbc": Solver(_create_cbc, _run, _read_cbc, "install the cbc program"),
}
