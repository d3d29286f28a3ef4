"""How a method solves one problem: solver, gap, limits and clock, shared by all methods."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from planner.optimiser.names import DEFAULT_SOLVER
from quant.common.errors import SpecError


@dataclass(frozen=True)
class SolveOptions:
    """Options of solving; `relative_gap` is of the objective, `upper_bound` in seconds.

    Only assignments better than `upper_bound` by more than the gap are of interest. Raises
    SpecError for figures out of range.
    """

    solver: str = DEFAULT_SOLVER
    time_limit_s: float | None = None
    relative_gap: float = 1e-4
    upper_bound: float = math.inf
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        if not 0 <= self.relative_gap < 1:
            raise SpecError(f"relative gap is {self.relative_gap}; give 0 or more, below 1")
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise SpecError(f"time limit is {self.time_limit_s} s; give more than 0, or none")
        if math.isnan(self.upper_bound):
            raise SpecError("upper bound is not a number; give seconds, or none")

    @property
    def target(self) -> float:
        """Seconds that an assignment must stay below to be of interest."""
        return self.upper_bound * (1 - self.relative_gap)
