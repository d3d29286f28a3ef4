"""Solving one problem to a proven gap by an integer programme.

1. The relaxation (`windows`) bounds the objective and says about where stages end.
2. The integer programme with each boundary held near there gives a good plan quickly.
3. Whatever beats that plan, or the caller's upper bound, has its boundaries in small windows.
4. The integer programme inside the windows is solved to the gap that was asked for.

Every objective is that of `evaluate`; a solver's own value is never reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.optimiser.assignment import Assignment, stage_times
from planner.optimiser.bit_assignment import Candidate, assign_bits, smallest_candidate
from planner.optimiser.capacity import fullest_bytes, require_feasible
from planner.optimiser.milp.programme import AssignmentModel, Restriction, build_model
from planner.optimiser.milp.solvers.solver import SolverLimits, SolverOutcome
from planner.optimiser.milp.solvers.table import require_solver, solve_model
from planner.optimiser.milp.windows import BoundaryRelaxation
from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.solve_options import SolveOptions

NEAR_GAP = 1e-2  # relative gap of the first plan: windows hardly shrink with a better one
NEAR_TIME_SHARE = 0.5  # of a time limit
CLOSE_ENOUGH = 1.05  # an upper bound within this of the relaxation makes step 2 needless
MEMORY_TIGHTENING = 1e-8  # relative; above a solver's tolerance of 1e-6 / MEMORY_UNITS
ROUNDING = 3e-7  # relative; above a solver's tolerance of 1e-6 / OBJECTIVE_UNITS


@dataclass(frozen=True)
class _Found:
    """The best assignment of one integer programme, and a bound (seconds) on all of its."""

    candidate: Candidate | None
    bound: float


class _Stopwatch:
    """Wall-clock seconds since the start, and what is left of the time limit."""

    def __init__(self, options: SolveOptions) -> None:
        self._options = options
        self._start = options.clock()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self._options.clock() - self._start

    def remaining_s(self, share: float = 1.0) -> float | None:
        """`share` of the time left, at least a hundredth of a second; None without a limit."""
        limit_s = self._options.time_limit_s
        return None if limit_s is None else max(0.01, share * (limit_s - self.seconds))


def solve_exactly(problem: AssignmentProblem, options: SolveOptions) -> Assignment:
    """The best assignment to within the gap, or the best found within the time limit.

    Raises InfeasibleError where nothing fits, SpecError where the solver cannot be used.
    """
    require_solver(options.solver)
    require_feasible(problem)
    watch = _Stopwatch(options)
    relaxed = BoundaryRelaxation(problem)
    if relaxed.bound >= options.target:
        return _cut_off(options.target, watch)
    incumbent = smallest_candidate(problem)
    if problem.stages > 1 and options.upper_bound > CLOSE_ENOUGH * relaxed.bound:
        limits = SolverLimits(
            max(NEAR_GAP, options.relative_gap), watch.remaining_s(NEAR_TIME_SHARE)
        )
        near = Restriction(relaxed.near_windows(), relaxed.bound)
        incumbent = _better(incumbent, _solve_restricted(problem, near, limits, options).candidate)
    cutoff = min(incumbent.objective, options.target)
    windows = relaxed.windows_within(cutoff)
    if windows is None:
        return _conclude(incumbent, cutoff, options, watch)
    limits = SolverLimits(options.relative_gap, watch.remaining_s())
    wanted = cutoff if cutoff < incumbent.objective else None
    found = _solve_restricted(problem, Restriction(windows, relaxed.bound, wanted), limits, options)
    bound = max(relaxed.bound, min(found.bound, cutoff))
    return _conclude(_better(incumbent, found.candidate), bound, options, watch)


def _solve_restricted(
    problem: AssignmentProblem,
    restriction: Restriction,
    limits: SolverLimits,
    options: SolveOptions,
) -> _Found:
    """Solve the programme under a restriction.

    A point that the solver's tolerance lets over a memory is solved again with that memory cut to
    what whole layers can really take of it; the bound stays the last run's that excluded nothing.
    """
    share = np.ones(problem.stages)
    bound = 0.0
    excludes_nothing = True
    for _ in range(problem.stages + 1):
        model = build_model(problem, restriction, share)
        outcome = solve_model(model.programme, options.solver, limits)
        if excludes_nothing:
            bound = _bound_s(outcome, model)
        if not outcome.has_point:
            return _Found(None, bound)
        candidate = assign_bits(problem, model.counts_found())
        if math.isfinite(candidate.objective):
            return _Found(candidate, bound)
        times = stage_times(problem, candidate.first_layer, candidate.bitwidth)
        for stage in np.flatnonzero(times.bytes > problem.memory_bytes):
            used = fullest_bytes(problem, int(stage)) / float(problem.memory_bytes[stage])
            share[stage] = min(used, share[stage] - MEMORY_TIGHTENING)
            excludes_nothing = excludes_nothing and used <= 1 - MEMORY_TIGHTENING
    return _Found(None, bound)


def _bound_s(outcome: SolverOutcome, model: AssignmentModel) -> float:
    """The solver's bound in seconds: infinite if nothing is feasible, zero if it knows none."""
    if outcome.status == "infeasible":
        return math.inf
    if outcome.bound is None or not math.isfinite(outcome.bound):
        return 0.0
    return outcome.bound * model.scale_s


def _better(incumbent: Candidate, other: Candidate | None) -> Candidate:
    """Choose the one with the lower objective."""
    if other is not None and other.objective < incumbent.objective:
        return other
    return incumbent


def _conclude(
    best: Candidate, bound: float, options: SolveOptions, watch: _Stopwatch
) -> Assignment:
    """Name the outcome: proven within the gap, cut off, or out of time."""
    if best.objective >= options.target and bound >= options.target * (1 - ROUNDING):
        return _cut_off(options.target, watch)
    bound = min(bound, best.objective)
    proven = best.objective - bound <= (options.relative_gap + ROUNDING) * best.objective
    status = "optimal" if proven else "time_limit"
    return Assignment(best.first_layer, best.bitwidth, best.objective, bound, status, watch.seconds)


def _cut_off(target: float, watch: _Stopwatch) -> Assignment:
    """Say that no assignment is below the target."""
    return Assignment((), (), math.inf, target, "cutoff", watch.seconds)
