"""Gurobi in this process, where it is installed and licensed."""

from __future__ import annotations

import pulp

from planner.optimiser.milp.solvers.solver import (
    ABSOLUTE_GAP,
    Solver,
    SolverLimits,
    SolverOutcome,
    SolverUnavailableError,
    read_status,
)


def _create(limits: SolverLimits) -> pulp.LpSolver:
    """Give the gaps as Gurobi's own parameters: PuLP passes no relative gap of zero on."""
    return pulp.GUROBI(
        msg=False,
        timeLimit=limits.time_limit_s,
        OutputFlag=0,  # first, or the other two are printed
        MIPGap=limits.relative_gap,
        MIPGapAbs=ABSOLUTE_GAP,
    )


def _run(model: pulp.LpProblem, backend: pulp.LpSolver) -> None:
    """Turn a refused licence or a model above its size into SolverUnavailableError."""
    import gurobipy  # an optional extra

    try:
        model.solve(backend)
    except gurobipy.GurobiError as error:
        raise SolverUnavailableError(
            f"gurobi refused a model of {model.numVariables()} variables and "
            f"{model.numConstraints()} constraints: {error}; install a full licence "
            "(the one from the registry allows 2000 of each) or use solver 'highs'"
        ) from error


def _read(model: pulp.LpProblem) -> SolverOutcome:
    """Ask Gurobi itself after a time limit: PuLP calls such a run unsolved, even with a point."""
    native = model.solverModel
    if model.status == pulp.LpStatusNotSolved:
        return SolverOutcome("time_limit", native.SolCount > 0, float(native.ObjBound))
    bound = float(native.ObjBound) if model.status == pulp.LpStatusOptimal else None
    return read_status(model, bound)


GUROBI = Solver(_create, _run, _read, "install gurobipy and a licence")
