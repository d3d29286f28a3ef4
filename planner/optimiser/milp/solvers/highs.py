"""HiGHS in this process, by PuLP."""

from __future__ import annotations

import pulp

from planner.optimiser.milp.solvers.solver import (
    ABSOLUTE_GAP,
    Solver,
    SolverLimits,
    SolverOutcome,
    read_status,
    run_model,
)


def _create(limits: SolverLimits) -> pulp.LpSolver:
    return pulp.HiGHS(
        msg=False,
        gapRel=limits.relative_gap,
        gapAbs=ABSOLUTE_GAP,
        timeLimit=limits.time_limit_s,
    )


def _read(model: pulp.LpProblem) -> SolverOutcome:
    return read_status(model, float(model.solverModel.getInfo().mip_dual_bound))


HIGHS = Solver(_create, run_model, _read, "install highspy")
