"""The search over candidates: every device order with every pair of micro-batch sizes (Alg. 1).

Each candidate gets a lower bound first; candidates are solved from the most promising on, each only
as far as it can beat the best plan found before.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from planner.cluster.device import Device
from planner.costs.model import CostModel
from planner.optimiser.assignment import Assignment, SolveOptions
from planner.optimiser.names import DEFAULT_SOLVER
from planner.optimiser.relaxation import ROUNDING
from planner.optimiser.sensitivity_tables import LossTables
from planner.optimiser.solve import solve_by
from planner.optimiser.solvers import SolverUnavailableError
from planner.options import PlanOptions
from planner.plan.builder import Solution
from planner.search.candidates import Candidates, SearchCandidate
from planner.search.fitting import first_sets, misfit, neighbours, unused_devices
from planner.search.orders import canonical_devices, cost_key, distinct_sets
from quant.common.errors import DoesNotFitError, InfeasibleError

DESCENT_GAP = 1e-2
"""Relative gap at which fewer devices are tried before the search goes on with more of them."""

LEAST_SOLVE_S = 0.1  # for a candidate that was begun before time was up
LOOKING = 0.5  # share of the time that is left for solving candidates


class SearchTime:
    """Seconds in which several searches end; each gets half of what is left when it begins."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._end_s, self._clock = clock() + limit_s, clock

    def part(self, share: float) -> SearchTime:
        """Such a share of the seconds that are left."""
        return SearchTime(share * max(0.0, self._end_s - self._clock()), self._clock)

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._end_s

    def next_s(self) -> float:
        """Seconds for the next search; once time is up enough for its first plan only."""
        return max(LEAST_SOLVE_S, (self._end_s - self._clock()) / 2)


class CandidateSearch:
    """Solves candidates, best bound first, until none can be better than the gap, or out of time
    (`search_time_limit`) with a plan. Plans up to `slack` above the best are kept, `most_kept` of
    them (None: all).
    """

    def __init__(
        self,
        options: PlanOptions,
        clock: Callable[[], float],
        slack: float = 0.0,
        most_kept: int | None = None,
    ) -> None:
        self._options = options
        self._clock = clock
        self._slack, self._most_kept = slack, most_kept
        self._start = clock()
        self._tables: LossTables | None = None
        self._best: tuple[SearchCandidate, Assignment] | None = None
        self._kept: list[tuple[SearchCandidate, Assignment]] = []
        self._bound = math.inf
        self._solved = 0

    def run(self, searched: Sequence[Candidates], gap: float, most: int | None = None) -> None:
        """Search until none left can beat the best by more than `gap`, or `most` are solved."""
        for _ in range(most) if most is not None else itertools.count():
            if not searched or self.is_over:
                return
            candidates = min(searched, key=lambda each: each.bound)
            if candidates.bound >= self._lowest() * (1 - gap):
                return
            self._try(candidates.pop(lambda: self.share_left <= 0))

    def consider(self, candidate: SearchCandidate, gap: float) -> None:
        """Solve a candidate if it can beat the best plan by more than `gap`."""
        if candidate.bound < self._lowest() * (1 - gap) and not self.is_over:
            self._try(candidate)

    @property
    def best(self) -> SearchCandidate | None:
        return None if self._best is None else self._best[0]

    @property
    def is_over(self) -> bool:
        """Whether time is up and there is a plan."""
        return self._best is not None and self.share_left <= 0

    @property
    def share_left(self) -> float:
        """The share of the time that is left; not positive once it is up."""
        return self._seconds_left() / self._options.search_time_limit

    def solutions(self, searched: Sequence[Candidates]) -> list[Solution]:
        """The best plan of all `searched`, then others within the slack; InfeasibleError if there
        is none. "optimal" only if proven over all candidates.
        """
        count = sum(candidates.count for candidates in searched)
        if self._best is None:
            raise InfeasibleError(
                f"method {self._options.method} has no plan for any of {count} candidates; "
                "use method auto"
            )
        bound = min((self._bound, *(candidates.bound for candidates in searched)))
        # A plan is of interest only where it beats the best by the gap.
        target = self._lowest() * (1 - self._options.relative_gap)
        proven = bound >= target * (1 - ROUNDING)
        most = self._lowest() * (1 + self._slack)
        kept = [each for each in self._kept if each[1].objective < most]
        others = sorted(kept, key=lambda each: each[1].objective)
        return [
            Solution(
                candidate.workload,
                candidate.devices,
                candidate.sizes,
                assignment
                if proven or assignment.status != "optimal"
                else replace(assignment, status="time_limit"),
                min(bound, assignment.objective),
                count,
                self._solved,
                self._clock() - self._start,
                candidate.head_on_first,
                self._options.solver,
            )
            for candidate, assignment in (self._best, *others)
        ]

    def _seconds_left(self) -> float:
        return self._options.search_time_limit - (self._clock() - self._start)

    def _lowest(self) -> float:
        return math.inf if self._best is None else self._best[1].objective

    def _most(self) -> float:
        most = self._lowest() * (1 + self._slack)
        if self._most_kept is None or len(self._kept) < self._most_kept - 1:
            return most
        # The plans that are kept come to that many with the best one.
        others = sorted(found.objective for _, found in self._kept)
        return min(most, others[max(self._most_kept - 2, 0)])

    def _try(self, candidate: SearchCandidate) -> None:
        self._solved += 1
        try:
            found = self._solve(candidate)
        except InfeasibleError:
            self._bound = min(self._bound, candidate.bound)
            return
        self._bound = min(self._bound, max(candidate.bound, found.bound))
        if found.objective < self._lowest():
            beaten, self._best = self._best, (candidate, found)
            self._kept += [] if beaten is None else [beaten]
        elif found.objective < self._most():
            self._kept.append((candidate, found))

    def _solve(self, candidate: SearchCandidate) -> Assignment:
        try:
            return self._solve_as_asked(candidate)
        except SolverUnavailableError as error:
            warnings.warn(f"{error}; going on with {DEFAULT_SOLVER}", stacklevel=2)
            self._options = replace(self._options, solver=DEFAULT_SOLVER)
            return self._solve_as_asked(candidate)

    def _solve_as_asked(self, candidate: SearchCandidate) -> Assignment:
        options, problem = self._options, candidate.problem
        limit_s = min(options.ilp_time_limit, max(self._seconds_left(), LEAST_SOLVE_S))
        limits = SolveOptions(
            options.solver, limit_s, options.relative_gap, self._most(), self._clock
        )
        if self._tables is None:
            self._tables = LossTables(problem)
        return solve_by(options.method, problem, limits, self._tables)


def search(costs: CostModel, clock: Callable[[], float] = time.perf_counter) -> Solution:
    """The best of every order and size of all devices, then of fewer while that is better. First
    sets are searched together, as many as half of the time allows, later ones one by one. The bound
    holds for candidates looked at: all devices, and sets one device away from a best one.
    """
    runner = CandidateSearch(costs.options, clock)
    searched, tried = list[Candidates](), set[Hashable]()
    first = map(canonical_devices, first_sets(costs))

    def look_at(sets: Iterable[tuple[Device, ...]]) -> Iterator[list[Candidates]]:
        for devices in sets:
            if runner.is_over:
                return
            if cost_key(devices) not in tried:
                tried.add(cost_key(devices))
                found = _candidates(costs, devices)
                searched.extend(found)
                yield found

    for _ in look_at(first):
        if searched and runner.share_left < LOOKING:
            break
    gap = max(DESCENT_GAP, costs.options.relative_gap)
    pending: Iterable[tuple[Device, ...]] = first
    while pending:
        for found in look_at(pending):
            runner.run(found, gap)
        runner.run(searched, gap)
        pending = untried_sets(costs, runner, tried)
        if not pending:
            runner.run(searched, costs.options.relative_gap)
            pending = untried_sets(costs, runner, tried)
    if not searched:
        raise misfit(costs)
    return runner.solutions(searched)[0]


def untried_sets(
    costs: CostModel, runner: CandidateSearch, tried: set[Hashable]
) -> list[tuple[Device, ...]]:
    """The sets of devices to try next: those one device away from that of the best plan so far."""
    if runner.is_over:
        return []
    used = costs.cluster.devices if runner.best is None else runner.best.devices
    near = list(neighbours(costs, used))
    if not costs.options.keep_all_devices:
        near += [tuple(each for each in used if each is not left_out) for left_out in used]
        near += [(*used, added) for added in unused_devices(costs, used)]
    near = distinct_sets(near)
    return [devices for devices in near if devices and cost_key(devices) not in tried]


def _candidates(costs: CostModel, devices: tuple[Device, ...]) -> list[Candidates]:
    try:
        return [Candidates(costs.on(devices))]
    except DoesNotFitError:
        return []
