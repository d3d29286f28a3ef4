"""How a method solves one problem: gap, limits and clock, shared by all methods."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class SolveOptions:
    """How a method solves; `relative_gap` is of the objective, `upper_bound` in seconds.

    Only assignments better than `upper_bound` by more than the gap are of interest.
    """

    solver: str = "highs"
    time_limit_s: float | None = None
    relative_gap: float = 1e-4
    upper_bound: float = math.inf
    clock: Callable[[], float] = time.perf_counter

    @property
    def target(self) -> float:
        """Seconds that an assignment must stay below to be of interest."""
        return self.upper_bound * (1 - self.relative_gap)
