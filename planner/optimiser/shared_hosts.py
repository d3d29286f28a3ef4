"""Problems whose stages share hosts, solved as problems in which each has a share of its own.

The first allows every stage all of its host. Where stages take more than there is, each of them is
given its part of what they took: in any assignment that fits at least one takes no more than that,
so it is found in one of as many problems with one lower limit, which are solved in turn, the most
promising first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from planner.optimiser.assignment import (
    Assignment,
    SolveOptions,
    conclude,
    evaluate,
    stage_times,
)
from planner.optimiser.feasibility import require_feasible
from planner.optimiser.problem import AssignmentProblem, FloatArray
from planner.optimiser.relaxation import ROUNDING
from planner.optimiser.two_memories import fitting_shares, shares_beside, with_shares
from quant.common.errors import InfeasibleError

MOST_SOLVED = 24
"""Problems with one share or another; what is left then is part of the bound."""

_ROUNDING = 1e-14  # of sums of shares

Solve = Callable[[AssignmentProblem, SolveOptions], Assignment]
"""An exact method for problems that share nothing."""


def solve_sharing(
    problem: AssignmentProblem, options: SolveOptions, solve: Solve, most: int = MOST_SOLVED
) -> Assignment:
    """The best assignment found, never worse than with even shares where these fit, and a bound;
    InfeasibleError where nothing fits.
    """
    require_feasible(problem)
    return _Sharing(problem, options, solve).result(most)


class _Sharing:
    def __init__(self, problem: AssignmentProblem, options: SolveOptions, solve: Solve) -> None:
        self._problem, self._options, self._solve = problem, options, solve
        self._start_s = options.clock()
        self._best: Assignment | None = None
        self._closed = math.inf
        self._open: list[tuple[float, int, FloatArray, FloatArray]] = []
        self._solved = 0

    def result(self, most: int) -> Assignment:
        options, shares = self._options, None
        self._add(self._problem.host_memory_bytes, 0.0)
        if self._open:
            shares = fitting_shares(self._problem)
        if shares is not None:
            self._offer(shares)
            self._offer(shares_beside(self._problem, self._open[0][3]))
        while self._open and self._solved < most and self._left_s() != 0:
            if self._open[0][0] >= self._upper * (1 - options.relative_gap):
                break
            limits, parts = self._parts()
            bound = heapq.heappop(self._open)[0]
            for stage in np.flatnonzero((parts > 0) & (parts < limits)).tolist():
                lower = limits.copy()
                lower[stage] = parts[stage] * (1 + _ROUNDING)
                self._add(lower, bound)
        bound = min(self._closed, *(each[0] for each in self._open), math.inf)
        if self._best is None:
            seconds, bound = options.clock() - self._start_s, min(bound, options.target)
            return Assignment((), (), math.inf, bound, "cutoff", seconds)
        return conclude(self._best, bound, options, self._start_s, 2 * ROUNDING)

    @property
    def _upper(self) -> float:
        best_s = math.inf if self._best is None else self._best.objective
        return min(self._options.upper_bound, best_s)

    def _left_s(self) -> float | None:
        if self._options.time_limit_s is None:
            return None
        spent_s = self._options.clock() - self._start_s
        return max(0.0, self._options.time_limit_s - spent_s)

    def _parts(self) -> tuple[FloatArray, FloatArray]:
        """The limits [N] of the most promising problem, and what is left of its assignment's bytes
        on the host that is exceeded most, if each stage there has its part of it (else limits).
        """
        _, _, limits, used = self._open[0]
        over = [used[list(host.stages)].sum() / host.memory_bytes for host in self._problem.hosts]
        host, parts = int(np.argmax(over)), limits.copy()
        stages = list(self._problem.hosts[host].stages)
        parts[stages] = used[stages] / over[host]
        return limits, parts

    def _add(self, limits: FloatArray, least_s: float) -> None:
        """Solve a problem, no assignment of which is below `least_s`."""
        found = self._offer(limits)
        if found is None:
            return
        bound = max(least_s, found.bound)
        used = np.zeros(0)
        if found.first_layer:
            used = stage_times(self._problem, found.first_layer, found.bitwidth).host_bytes
            if math.isinf(evaluate(self._problem, found.first_layer, found.bitwidth)):
                heapq.heappush(self._open, (bound, self._solved, limits, used))
                return
        self._closed = min(self._closed, bound)

    def _offer(self, shares: FloatArray) -> Assignment | None:
        """What is found with such shares, kept where it fits and is the best so far."""
        self._solved += 1
        left_s, options = self._left_s(), replace(self._options, upper_bound=self._upper)
        if left_s is not None:
            options = replace(options, time_limit_s=max(left_s / 2, 0.01))
        try:
            found = self._solve(with_shares(self._problem, shares), options)
        except InfeasibleError:
            return None
        if found.first_layer:
            objective = evaluate(self._problem, found.first_layer, found.bitwidth)
            if objective < self._upper:
                self._best = found
        return found
