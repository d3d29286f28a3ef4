"""The bound and the prices of one problem: linear programme first, then the path at its prices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.optimiser.capacity import is_feasible
from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.relaxation.linear_programme import LinearOptimum, LinearProgramme
from planner.optimiser.relaxation.prices import PathBound, PricedProblem

ROUNDING = 1e-8  # relative; above the rounding of sums of seconds


@dataclass(frozen=True, eq=False)
class RelaxedProblem:
    """A problem with its linear bound and prices, ready to be solved."""

    priced: PricedProblem
    programme: LinearProgramme
    optimum: LinearOptimum
    path: PathBound

    @property
    def bound(self) -> float:
        """A lower bound on every assignment's objective, in seconds."""
        return max(self.optimum.bound * (1 - ROUNDING), self.path.bound * (1 - ROUNDING), 0.0)


def relax(problem: AssignmentProblem) -> RelaxedProblem:
    """Bound and price a feasible problem; takes milliseconds."""
    priced = PricedProblem(problem)
    programme = LinearProgramme(priced)
    optimum = programme.minimum()
    return RelaxedProblem(priced, programme, optimum, priced.path_bound(optimum.prices))


def lower_bound(problem: AssignmentProblem) -> float:
    """A lower bound (seconds) on the objective of every assignment; infinite if none fits."""
    return relax(problem).bound if is_feasible(problem) else math.inf
