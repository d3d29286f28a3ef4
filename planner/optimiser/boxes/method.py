"""Solving one problem by boxes (`planner.optimiser.boxes.search`), to a proven gap.

1. The relaxation bounds the objective and prices what couples the stages.
2. Under a limit a little above that bound few ways of filling a stage are left; they are listed.
3. Boxes are searched. If nothing lies below the limit it is raised, up to any known plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.optimiser.assignment import Assignment
from planner.optimiser.bit_assignment import Candidate, assign_bits, smallest_candidate
from planner.optimiser.boxes.search import Box, BoxSearch, Path
from planner.optimiser.boxes.stage_options import ListingLimits, StageLister
from planner.optimiser.capacity import require_feasible
from planner.optimiser.milp.method import solve_exactly
from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.relaxation.relax import ROUNDING, RelaxedProblem, relax
from planner.optimiser.sensitivity_tables import SensitivityTables
from planner.optimiser.solve_options import SolveOptions

GROWTH = (1.02, 1.06, 1.2, 1.6)  # limits tried, over the bound; each costs more than the last
MOST_ENTRIES = 60_000_000  # options looked at for one limit: about 2 GB and 10 s; else the ILP


def solve_by_boxes(
    problem: AssignmentProblem,
    options: SolveOptions,
    tables: SensitivityTables | None = None,
) -> Assignment:
    """The best assignment to within the gap, or the best found within the time limit.

    `tables` of the problem's sensitivity may be handed in. Raises InfeasibleError where nothing
    fits.
    """
    require_feasible(problem)
    start = options.clock()
    tables = tables or SensitivityTables(problem.sensitivity)
    return _BoxMethod(relax(problem), tables, options, start).result()


class _BoxMethod:
    """One solve: its best assignment and the bound proven so far."""

    def __init__(
        self,
        relaxed: RelaxedProblem,
        tables: SensitivityTables,
        options: SolveOptions,
        start: float,
    ) -> None:
        self._relaxed = relaxed
        self._problem = relaxed.priced.problem
        self._tables = tables
        self._options = options
        self._start = start
        self._found: Candidate | None = None
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
        """Yield objectives to stay below, one after the other, as long as they are needed."""
        for growth in (*GROWTH, math.inf):
            raised = growth * self._relaxed.bound if math.isfinite(growth) else growth
            yield min(self._target(), raised)
            if self._bound >= self._target() * (1 - ROUNDING):
                return

    def _target(self) -> float:
        """Seconds below which an assignment is still of interest."""
        gap = max(self._options.relative_gap, ROUNDING)
        if self._found is None and math.isfinite(self._options.target):
            return self._options.target
        return min(self._options.target, self._best.objective * (1 - gap))

    @property
    def _best(self) -> Candidate:
        """The best assignment so far; the smallest layers where none has been looked for."""
        if self._found is None:
            self._found = smallest_candidate(self._problem)
        return self._found

    def _search(self, limit: float) -> bool:
        """Search everything below `limit`; False if that is too much to list."""
        relaxed = self._relaxed
        slowest = relaxed.programme.slowest_stages(limit)
        if slowest is None:
            self._bound = max(self._bound, limit)
            return True
        prices = relaxed.optimum.prices
        limits = ListingLimits(limit, slowest, prices, relaxed.path)
        lister = StageLister(relaxed.priced, self._tables, limits)
        if lister.entries() > MOST_ENTRIES:
            return False
        kinds = [lister.options(kind) for kind in range(relaxed.priced.kinds.count.size)]
        form = relaxed.priced.form
        box = Box(
            form.prefill_floor_s,
            form.decode_floor_s,
            tuple(kinds[kind] for kind in relaxed.priced.kinds.of_stage),
        )
        search = BoxSearch(
            relaxed.priced, prices, self._options.relative_gap, limit, self._out_of_time
        )
        bound = search.run(box, self._bound)
        if search.best is not None and (
            self._found is None or search.best.objective < self._found.objective
        ):
            found = self._candidate(search.best)
            if self._found is None or found.objective < self._found.objective:
                self._found = found
        self._bound = max(self._bound, bound)
        return True

    def _candidate(self, path: Path) -> Candidate:
        """The assignment behind a path."""
        width = self._problem.layers + 1
        rows = [self._tables.counts(run % width - run // width)[row] for run, row in path.picks]
        return assign_bits(self._problem, np.stack(rows))

    def _out_of_time(self) -> bool:
        limit_s = self._options.time_limit_s
        return limit_s is not None and self._options.clock() - self._start > limit_s

    def _with_programme(self) -> Assignment:
        """Solve by the integer programme in the time that is left."""
        limit_s = self._options.time_limit_s
        if limit_s is not None:
            limit_s = max(limit_s - (self._options.clock() - self._start), limit_s / 10)
        return solve_exactly(self._problem, replace(self._options, time_limit_s=limit_s))

    def _conclude(self) -> Assignment:
        """Name the outcome: proven within the gap, cut off, or out of time."""
        target, seconds = self._options.target, self._options.clock() - self._start
        best_s = math.inf if self._found is None else self._found.objective
        if best_s >= target and self._bound >= target * (1 - ROUNDING):
            return Assignment((), (), math.inf, target, "cutoff", seconds)
        best = self._best
        bound = min(self._bound, best.objective)
        gap = self._options.relative_gap + 2 * ROUNDING
        proven = best.objective - bound <= gap * best.objective
        status = "optimal" if proven else "time_limit"
        return Assignment(best.first_layer, best.bitwidth, best.objective, bound, status, seconds)
