"""Windows of stage boundaries, which make the integer programme small.

They come from the linear programme with every stage alone: near its optimum for a good plan at
once, and around every plan below a cutoff for the proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.relaxation.linear_programme import LinearProgramme
from planner.optimiser.relaxation.prices import PricedProblem
from planner.optimiser.relaxation.stage_kinds import each_stage_alone

COUNT_SLACK = 1e-5  # layers; above the LP solver's tolerance on a count
NEAR_LAYERS = 1  # how far from the relaxed boundaries the first plan is sought


@dataclass(frozen=True)
class Window:
    """A stage boundary lies between these two first layers, both included."""

    least: int
    most: int


class BoundaryRelaxation:
    """The linear programme of one problem, solved for its bound and for windows."""

    def __init__(self, problem: AssignmentProblem) -> None:
        self._problem = problem
        self._programme = LinearProgramme(PricedProblem(problem, each_stage_alone(problem)))
        optimum = self._programme.minimum()
        self.bound = optimum.bound
        self._boundaries = np.cumsum(optimum.held)[:-1].tolist()

    def near_windows(self) -> tuple[Window, ...]:
        """Boundaries within `NEAR_LAYERS` of the relaxed ones, and a layer on either end."""
        last = self._problem.layers - 1
        return tuple(
            Window(
                min(last, max(1, math.floor(boundary) - NEAR_LAYERS)),
                max(1, min(last, math.ceil(boundary) + NEAR_LAYERS)),
            )
            for boundary in self._boundaries
        )

    def windows_within(self, cutoff: float) -> tuple[Window, ...] | None:
        """Find where each of the N-1 boundaries lies in any assignment of at most `cutoff` seconds.

        None if no assignment is that good.
        """
        last = self._problem.layers - 1
        windows = []
        for boundary in range(1, self._problem.stages):
            extremes = self._programme.extremes(self._programme.layers_before(boundary), cutoff)
            if extremes is None:
                return None
            least, most = max(1.0, extremes[0] - COUNT_SLACK), min(last, extremes[1] + COUNT_SLACK)
            window = Window(math.ceil(least), math.floor(most))
            if window.least > window.most:
                return None
            windows.append(window)
        return tuple(windows)
