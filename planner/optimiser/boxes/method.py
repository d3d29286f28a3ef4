"""Solving one assignment problem by boxes (`planner.optimiser.boxes.search`), to a proven gap.

1. The linear programme over kinds of stages bounds the objective and prices what couples them.
2. Under a limit a little above that bound few ways of filling a stage are left; they are listed.
3. Boxes are searched. If nothing lies below the limit it is raised, up to any known plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from planner.optimiser.boxes.kind_programme import KindProgramme, KindSolution
from planner.optimiser.boxes.multipliers import PathBound, PricedProblem
from planner.optimiser.boxes.search import Box, BoxSearch, Path
from planner.optimiser.boxes.stage_options import Reach, StageLister
from planner.optimiser.capacity import require_feasible
from planner.optimiser.layer_choice import Candidate, recover, smallest_candidate
from planner.optimiser.milp.method import solve_exactly
from planner.optimiser.problem import Assignment, AssignmentProblem, PhaseSeconds, Status
from planner.optimiser.quality_tables import QualityTables
from planner.optimiser.solve_options import SolveOptions

GROWTH = (1.02, 1.06, 1.2, 1.6)  # limits tried, over the bound; each costs more than the last
ROUNDING = 1e-8  # relative; above the rounding of sums of seconds
MOST_ENTRIES = 60_000_000  # options looked at for one limit: about 2 GB and 10 s; else the ILP


@dataclass(frozen=True, eq=False)
class RelaxedProblem:
    """A problem with its linear bound and prices, ready to be solved."""

    priced: PricedProblem
    programme: KindProgramme
    solution: KindSolution
    path: PathBound

    @property
    def bound(self) -> float:
        """A lower bound on every assignment's objective, in seconds."""
        return max(self.solution.bound * (1 - ROUNDING), self.path.bound * (1 - ROUNDING), 0.0)


def relax(problem: AssignmentProblem) -> RelaxedProblem:
    """The bound and prices of a feasible problem; milliseconds."""
    priced = PricedProblem(problem)
    programme = KindProgramme(priced)
    solution = programme.minimum()
    return RelaxedProblem(priced, programme, solution, priced.path_bound(solution.prices))


def solve_by_boxes(
    problem: AssignmentProblem,
    options: SolveOptions,
    tables: QualityTables | None = None,
) -> Assignment:
    """The best assignment to within the gap, or the best found within the time limit.

    `tables` of the problem's sensitivity may be handed in. Raises InfeasibleError where nothing
    fits.
    """
    require_feasible(problem)
    start = options.clock()
    run = _Run(relax(problem), tables or QualityTables(problem.sensitivity), options, start)
    return run.result()


class _Run:
    """One solve: its incumbent and the bound proven so far."""

    def __init__(
        self, relaxed: RelaxedProblem, tables: QualityTables, options: SolveOptions, start: float
    ) -> None:
        self._relaxed = relaxed
        self._problem = relaxed.priced.problem
        self._tables = tables
        self._options = options
        self._start = start
        self._best = smallest_candidate(self._problem)
        self._bound = relaxed.bound

    def result(self) -> Assignment:
        """Raise the limit until the best plan lies below it, or nothing of interest does."""
        for limit in self._limits():
            if limit <= self._bound:
                continue
            if not self._search(limit):
                return self._with_programme()
            if self._out_of_time():
                break
        return self._conclude()

    def _limits(self) -> Iterator[float]:
        """Objectives to stay below, one after the other, as long as they are needed."""
        for growth in (*GROWTH, math.inf):
            raised = growth * self._relaxed.bound if math.isfinite(growth) else growth
            yield min(self._target(), raised)
            if self._bound >= self._target() * (1 - ROUNDING):
                return

    def _target(self) -> float:
        """Seconds below which an assignment is still of interest."""
        gap = max(self._options.relative_gap, ROUNDING)
        return min(self._options.target, self._best.objective * (1 - gap))

    def _search(self, limit: float) -> bool:
        """Everything below `limit`; False if that is too much to list."""
        relaxed = self._relaxed
        slowest = relaxed.programme.slowest_stages(limit)
        if slowest is None:
            self._bound = max(self._bound, limit)
            return True
        prices = relaxed.solution.prices
        reach = Reach(limit, slowest.prefill_most, slowest.decode_most, prices, relaxed.path)
        lister = StageLister(relaxed.priced, self._tables, reach)
        if lister.entries() > MOST_ENTRIES:
            return False
        kinds = [lister.options(kind) for kind in range(relaxed.priced.kinds.count.size)]
        box = Box(
            slowest.prefill_least,
            slowest.decode_least,
            tuple(kinds[kind] for kind in relaxed.priced.kinds.of_stage),
        )
        search = BoxSearch(
            relaxed.priced, prices, self._options.relative_gap, limit, self._out_of_time
        )
        bound = search.run(box, self._bound)
        if search.best is not None and search.best.objective < self._best.objective:
            found = self._candidate(search.best)
            self._best = min(self._best, found, key=lambda candidate: candidate.objective)
        self._bound = max(self._bound, bound)
        return True

    def _candidate(self, path: Path) -> Candidate:
        """The assignment behind a path."""
        width = self._problem.layers + 1
        rows = [self._tables.counts(run % width - run // width)[row] for run, row in path.picks]
        return recover(self._problem, np.stack(rows))

    def _out_of_time(self) -> bool:
        limit_s = self._options.time_limit_s
        return limit_s is not None and self._options.clock() - self._start > limit_s

    def _with_programme(self) -> Assignment:
        """Leave the rest to the integer programme."""
        limit_s = self._options.time_limit_s
        if limit_s is not None:
            limit_s = max(limit_s - (self._options.clock() - self._start), limit_s / 10)
        return solve_exactly(self._problem, replace(self._options, time_limit_s=limit_s))

    def _conclude(self) -> Assignment:
        """Name the outcome: proven within the gap, cut off, or out of time."""
        best, target = self._best, self._options.target
        seconds = self._options.clock() - self._start
        phases = (PhaseSeconds("boxes", seconds),)
        if best.objective >= target and self._bound >= target * (1 - ROUNDING):
            return Assignment((), (), math.inf, target, "cutoff", seconds, phases)
        bound = min(self._bound, best.objective)
        gap = self._options.relative_gap + 2 * ROUNDING
        status: Status = (
            "optimal" if best.objective - bound <= gap * best.objective else "time_limit"
        )
        return Assignment(
            best.first_layer, best.bitwidth, best.objective, bound, status, seconds, phases
        )
