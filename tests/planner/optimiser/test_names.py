"""Every name that can be chosen has its method or solver, and the other way round."""

from __future__ import annotations

from typing import get_args

from planner.optimiser.names import (
    BASELINE_METHODS,
    BATCH_OBJECTIVES,
    DEFAULT_SOLVER,
    JOB_OBJECTIVE,
    METHOD_NAMES,
    SOLVER_METHODS,
    SOLVER_NAMES,
    Objective,
)
from planner.optimiser.solve import METHODS
from planner.optimiser.solvers import SOLVERS


def test_names_and_tables_agree() -> None:
    assert tuple(METHODS) == METHOD_NAMES
    assert tuple(SOLVERS) == SOLVER_NAMES
    assert DEFAULT_SOLVER in SOLVERS
    assert {*SOLVER_METHODS, *BASELINE_METHODS} <= set(METHODS)
    assert {*BATCH_OBJECTIVES, JOB_OBJECTIVE} == set(get_args(Objective))
