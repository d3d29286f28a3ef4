"""The search over candidates: every device order with every pair of micro-batch sizes (Alg. 1).

Each candidate gets a lower bound first; candidates are solved from the most promising on, each only
as far as it can beat the best plan found before.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from planner.cluster.device import Device
from planner.costs.model import CostModel
from planner.optimiser.assignment import Assignment
from planner.optimiser.milp.solvers.solver import SolverUnavailableError
from planner.optimiser.relaxation.relax import ROUNDING
from planner.optimiser.sensitivity_tables import SensitivityTables
from planner.optimiser.solve import solve_by
from planner.optimiser.solve_options import DEFAULT_SOLVER, SolveOptions
from planner.options import PlanOptions
from planner.plan.builder import Solution
from planner.search.candidates import Candidates, SearchCandidate
from planner.search.memory_fit import fitting_sets, misfit
from planner.search.orders.device_sets import cost_key, distinct_sets
from quant.common.errors import DoesNotFitError, InfeasibleError

DESCENT_GAP = 1e-2
"""Relative gap at which fewer devices are tried before the search goes on with more of them."""

LEAST_SOLVE_S = 0.1  # for a candidate that was begun before time was up


class CandidateSearch:
    """Solves candidates one by one, best bound first, until none can be better than the gap.

    Out of time (`search_time_limit`) it stops at the best plan so far, if there is one.
    """

    def __init__(self, options: PlanOptions, clock: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._start = clock()
        self._tables: SensitivityTables | None = None
        self._best: tuple[SearchCandidate, Assignment] | None = None
        self._bound = math.inf
        self._solved = 0

    def run(self, candidates: Candidates, gap: float) -> None:
        """Search `candidates` until none that is left can beat the best plan by more than `gap`."""
        while candidates.bound < self._lowest() * (1 - gap) and not self.is_over:
            self._try(candidates.pop())

    @property
    def best_devices(self) -> tuple[Device, ...] | None:
        """The devices of the best plan so far."""
        return None if self._best is None else self._best[0].devices

    @property
    def is_over(self) -> bool:
        """Whether time is up and there is a plan."""
        return self._best is not None and self._seconds_left() <= 0

    def solution(self, searched: Sequence[Candidates]) -> Solution:
        """The best plan of all that were `searched`; InfeasibleError if there is none.

        Its assignment is "optimal" only if that is proven over all candidates.
        """
        count = sum(candidates.count for candidates in searched)
        if self._best is None:
            raise InfeasibleError(
                f"method {self._options.method} has no plan for any of {count} candidates; "
                "use method auto"
            )
        candidate, assignment = self._best
        bound = min(self._bound, *(candidates.bound for candidates in searched))
        if assignment.status == "optimal" and bound < self._target() * (1 - ROUNDING):
            assignment = replace(assignment, status="time_limit")
        return Solution(
            candidate.devices,
            candidate.sizes,
            assignment,
            min(bound, assignment.objective),
            count,
            self._solved,
            self._clock() - self._start,
            candidate.head_on_first,
            self._options.solver,
        )

    def _seconds_left(self) -> float:
        return self._options.search_time_limit - (self._clock() - self._start)

    def _lowest(self) -> float:
        """The best objective so far, in seconds."""
        return math.inf if self._best is None else self._best[1].objective

    def _target(self) -> float:
        """Seconds below which a plan is still of interest."""
        return self._lowest() * (1 - self._options.relative_gap)

    def _try(self, candidate: SearchCandidate) -> None:
        """Solve one candidate, as far as it can beat the best."""
        self._solved += 1
        try:
            found = self._solve(candidate)
        except InfeasibleError:
            self._bound = min(self._bound, candidate.bound)
            return
        self._bound = min(self._bound, max(candidate.bound, found.bound))
        if found.objective < self._lowest():
            self._best = candidate, found

    def _solve(self, candidate: SearchCandidate) -> Assignment:
        """Solve with the solver that was asked for, or from its first refusal on with HiGHS."""
        try:
            return self._solve_as_asked(candidate)
        except SolverUnavailableError as error:
            warnings.warn(f"{error}; going on with {DEFAULT_SOLVER}", stacklevel=2)
            self._options = replace(self._options, solver=DEFAULT_SOLVER)
            return self._solve_as_asked(candidate)

    def _solve_as_asked(self, candidate: SearchCandidate) -> Assignment:
        """Solve by the method asked for; one set of tables serves all candidates."""
        options, problem = self._options, candidate.problem
        limit_s = options.ilp_time_limit
        if self._best is not None:
            limit_s = min(limit_s, max(self._seconds_left(), LEAST_SOLVE_S))
        limits = SolveOptions(
            options.solver, limit_s, options.relative_gap, self._lowest(), self._clock
        )
        if self._tables is None:
            self._tables = SensitivityTables(problem.sensitivity)
        return solve_by(options.method, problem, limits, self._tables)


def search(costs: CostModel, clock: Callable[[], float] = time.perf_counter) -> Solution:
    """The best of every order and size of all devices, then of fewer while that is better.

    The bound holds for the candidates that were looked at: all devices, and each set of devices
    that lacks one of a set that had the best plan, or has one more.
    """
    runner = CandidateSearch(costs.options, clock)
    searched: list[Candidates] = []
    pending, tried = distinct_sets(fitting_sets(costs)), set[Hashable]()
    while pending:
        for devices in pending:
            tried.add(cost_key(devices))
            smaller = replace(costs, cluster=replace(costs.cluster, devices=devices))
            try:
                searched.append(Candidates(smaller))
            except DoesNotFitError:
                continue
            runner.run(searched[-1], max(DESCENT_GAP, costs.options.relative_gap))
        pending = _untried(costs, runner, tried)
        if not pending:
            for candidates in searched:
                runner.run(candidates, costs.options.relative_gap)
            pending = _untried(costs, runner, tried)
    if not searched:
        raise misfit(costs)
    return runner.solution(searched)


def _untried(
    costs: CostModel, runner: CandidateSearch, tried: set[Hashable]
) -> list[tuple[Device, ...]]:
    """The sets of devices to try next: those one device away from that of the best plan so far."""
    if costs.options.keep_all_devices or runner.is_over:
        return []
    every = costs.cluster.devices
    best = {device.name for device in runner.best_devices or every}
    near = distinct_sets(
        [device for device in every if (device.name in best) != (device is changed)]
        for changed in every
    )
    return [devices for devices in near if devices and cost_key(devices) not in tried]
