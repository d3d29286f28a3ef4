"""CBC as a program of the system, or the one that PuLP brings."""

from __future__ import annotations

import warnings

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


def _read(model: pulp.LpProblem) -> SolverOutcome:
    return read_status(model, None)


CBC = Solver(_create, run_model, _read, "install the cbc program")
