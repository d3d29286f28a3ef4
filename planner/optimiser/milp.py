"""Solving one problem to a proven gap by the integer programme of LLM-PQ section 4.3 (eq. 4-16).

1. The linear programme, every stage alone, bounds the objective and says about where stages end.
2. The integer programme with each boundary held near there gives a good plan quickly.
3. Whatever beats that plan, or the caller's upper bound, has its boundaries in small windows.
4. The integer programme inside the windows is solved to the gap that was asked for.

The programme is a staircase of stages: `before[i][j]` is 1 where layer i lies on stage j or an
earlier one; it falls with i, which keeps stages contiguous as eq. 16 does with one constraint for
each pair of stages. `placed[i, j, b]` is the paper's z(i,j,b), `counts[j][cell]` its sum over the
layers of a kind.
Once boundaries and counts are whole numbers, placing the bits is a transport problem, whose corners
are whole numbers too: only those two are integer variables. Every objective is that of `evaluate`;
a solver's own value is never reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pulp

from planner.optimiser.assignment import (
    Assignment,
    SolveOptions,
    assign_bits,
    conclude,
    smallest_assignment,
    stage_times,
)
from planner.optimiser.feasibility import fullest_bytes, require_feasible, whole_layers
from planner.optimiser.prices import PricedProblem, each_stage_alone
from planner.optimiser.problem import (
    AssignmentProblem,
    FloatArray,
    IntArray,
    latency_form,
    typical_objective_s,
)
from planner.optimiser.relaxation import OBJECTIVE_UNITS, LinearProgramme, memory_unit_bytes
from planner.optimiser.shared_hosts import solve_sharing
from planner.optimiser.solvers import SolverOutcome, require_solver, solve_model

NEAR_LAYERS = 1  # how far from the relaxed boundaries the first plan is sought
NEAR_GAP = 1e-2  # relative gap of the first plan: windows hardly shrink with a better one
NEAR_TIME_SHARE = 0.5  # of a time limit
CLOSE_ENOUGH = 1.05  # an upper bound within this of the relaxation makes step 2 needless
COUNT_SLACK = 1e-5  # layers; above the LP solver's tolerance on a count
MEMORY_TIGHTENING = 1e-8  # relative; above a solver's tolerance of 1e-6 / MEMORY_UNITS
ROUNDING = 3e-7  # relative; above a solver's tolerance of 1e-6 / OBJECTIVE_UNITS

Window = tuple[int, int]  # the least and the most first layer of a stage, both included

# A variable, or 0 or 1 where the windows settle it.
Step: TypeAlias = "pulp.LpVariable | int"


def solve_exactly(problem: AssignmentProblem, options: SolveOptions) -> Assignment:
    """The best within the gap, or in time; InfeasibleError, or SpecError for the solver."""
    require_solver(options.solver)
    if problem.hosts:
        return solve_sharing(problem, options, solve_exactly)
    require_feasible(problem)
    start_s, limit_s = options.clock(), options.time_limit_s

    def left_s(share: float = 1.0) -> float | None:
        used_s = options.clock() - start_s
        return None if limit_s is None else max(0.01, share * (limit_s - used_s))

    relaxed = BoundaryRelaxation(problem)
    if relaxed.bound >= options.target:
        return conclude(None, relaxed.bound, options, start_s, ROUNDING)
    best = smallest_assignment(problem)
    if problem.stages > 1 and options.upper_bound > CLOSE_ENOUGH * relaxed.bound:
        programme = _Programme(problem, options.solver, relaxed.near_windows(), relaxed.bound)
        gap = max(NEAR_GAP, options.relative_gap)
        near, _ = programme.solve(gap, partial(left_s, NEAR_TIME_SHARE))
        best = _better(best, near)
    cutoff = min(best.objective, options.target)
    windows = relaxed.windows_within(cutoff)
    if windows is None:
        return conclude(best, cutoff, options, start_s, ROUNDING)
    wanted = cutoff if cutoff < best.objective else None
    programme = _Programme(problem, options.solver, windows, relaxed.bound, wanted)
    found, bound = programme.solve(options.relative_gap, left_s)
    bound = max(relaxed.bound, min(bound, cutoff))
    return conclude(_better(best, found), bound, options, start_s, ROUNDING)


def _better(best: Assignment, other: Assignment | None) -> Assignment:
    return best if other is None or other.objective >= best.objective else other


class BoundaryRelaxation:
    """The linear programme of one problem, solved for its bound and for windows of boundaries."""

    def __init__(self, problem: AssignmentProblem) -> None:
        self._problem = problem
        self._programme = LinearProgramme(PricedProblem(problem, each_stage_alone(problem)))
        self.bound, _, held = self._programme.minimum()
        self._boundaries = np.cumsum(held)[:-1].tolist()

    def near_windows(self) -> tuple[Window, ...]:
        """Boundaries within `NEAR_LAYERS` of the relaxed ones or the next that are open, and a
        layer on either end.
        """
        inner = self._problem.open_boundaries[1:-1]
        least = [math.floor(boundary) - NEAR_LAYERS for boundary in self._boundaries]
        most = [math.ceil(boundary) + NEAR_LAYERS for boundary in self._boundaries]
        first = np.searchsorted(inner, least, side="right") - 1
        last = np.searchsorted(inner, most)
        firsts, lasts = (inner[np.clip(each, 0, inner.size - 1)].tolist() for each in (first, last))
        return tuple(zip(firsts, lasts, strict=True))

    def windows_within(self, cutoff: float) -> tuple[Window, ...] | None:
        """Where N-1 boundaries lie in assignments of at most `cutoff` seconds; None if none is."""
        inner, last = self._problem.open_boundaries[1:-1], self._problem.layers - 1
        windows = []
        for boundary in range(1, self._problem.stages):
            extremes = self._programme.extremes(self._programme.layers_before(boundary), cutoff)
            if extremes is None:
                return None
            least = math.ceil(max(1.0, extremes[0] - COUNT_SLACK))
            most = math.floor(min(last, extremes[1] + COUNT_SLACK))
            within = inner[(inner >= least) & (inner <= most)]
            if not within.size:
                return None
            windows.append((int(within[0]), int(within[-1])))
        return tuple(windows)


@dataclass(frozen=True)
class _Programme:
    """The programme with boundary j in `windows[j]` [N-1]; `expected_s` is for scaling."""

    problem: AssignmentProblem
    solver: str
    windows: tuple[Window, ...]
    expected_s: float
    cutoff_s: float | None = None

    def solve(
        self, relative_gap: float, left_s: Callable[[], float | None]
    ) -> tuple[Assignment | None, float]:
        """The best assignment, and a bound (seconds) on all, in the seconds left. A point that the
        solver's tolerance lets over a memory is solved again with that memory cut to what whole
        layers can take; the bound is the last run's that excluded nothing.
        """
        problem, bound, excludes_nothing = self.problem, 0.0, True
        share = np.ones((len(problem.memories), problem.stages))
        for _ in range(problem.stages + 1):
            model = build_model(problem, self.windows, self.expected_s, self.cutoff_s, share)
            outcome = solve_model(model.programme, self.solver, relative_gap, left_s())
            if excludes_nothing:
                bound = _bound_s(outcome, model.scale_s)
            if not outcome.has_point:
                break
            found = assign_bits(problem, model.counts_found())
            if math.isfinite(found.objective):
                return found, bound
            times = stage_times(problem, found.first_layer, found.bitwidth)
            held = (times.bytes, times.host_bytes)
            for place, memory in enumerate(problem.memories):
                for stage in np.flatnonzero(held[place] > memory.limit_bytes).tolist():
                    fullest = fullest_bytes(problem, stage, memory)
                    used = fullest / max(float(memory.limit_bytes[stage]), 1.0)
                    share[place, stage] = min(used, share[place, stage] - MEMORY_TIGHTENING)
                    excludes_nothing = excludes_nothing and used <= 1 - MEMORY_TIGHTENING
        return None, bound


def _bound_s(outcome: SolverOutcome, scale_s: float) -> float:
    """The solver's bound in seconds: infinite if nothing is feasible, zero if it knows none."""
    if outcome.status == "infeasible":
        return math.inf
    if outcome.bound is None or not math.isfinite(outcome.bound):
        return 0.0
    return outcome.bound * scale_s


@dataclass(frozen=True, eq=False)
class AssignmentModel:
    """A model under construction and its variables; one model unit is `scale_s` seconds."""

    problem: AssignmentProblem
    scale_s: float
    programme: pulp.LpProblem
    before: list[list[Step]]  # [L][N]
    placed: dict[tuple[int, int, int], pulp.LpVariable]  # only where window and device allow
    counts: list[list[pulp.LpVariable]]  # [N][C * K]

    def counts_found(self) -> IntArray:
        values = [[variable.value() for variable in row] for row in self.counts]
        return np.rint(np.array(values, dtype=np.float64)).astype(np.int64)


def build_model(
    problem: AssignmentProblem,
    windows: Sequence[Window],
    expected_s: float,
    cutoff_s: float | None,
    memory_share: FloatArray,
) -> AssignmentModel:
    """The programme with boundaries in `windows` [N-1] and `memory_share`, about 1, of each of the
    memories of each stage in use.
    """
    size_s = expected_s if expected_s > 0 else typical_objective_s(problem)
    model = _declare(problem, windows, size_s / OBJECTIVE_UNITS)
    add_one_place_per_layer(model)
    add_contiguity(model)
    add_layer_counts(model)
    add_memory_limit(model, memory_share)
    objective = add_latency(model) + _quality_terms(model)
    model.programme.setObjective(objective)
    if cutoff_s is not None:
        model.programme.addConstraint(objective <= cutoff_s / model.scale_s, "cutoff")
    return model


def add_one_place_per_layer(model: AssignmentModel) -> None:
    """Give a layer one bitwidth where its staircase steps up, none elsewhere (eq. 9-11)."""
    stages, choices = model.problem.stages, len(model.problem.bitwidths)
    for layer, steps in enumerate(model.before):
        for stage in range(stages):
            here = steps[stage] - (steps[stage - 1] if stage else 0)
            cells = ((layer, stage, choice) for choice in range(choices))
            terms = [model.placed[cell] for cell in cells if cell in model.placed]
            if terms or not isinstance(here, int) or here:
                model.programme.addConstraint(pulp.lpSum(terms) == here)


def add_contiguity(model: AssignmentModel) -> None:
    """Keep every layer on its predecessor's stage or a later one (eq. 15-16)."""
    for steps, following in pairwise(model.before):
        for step, next_step in zip(steps, following, strict=True):
            if (
                step is not next_step
                and not isinstance(step, int)
                and not isinstance(next_step, int)
            ):
                model.programme.addConstraint(step >= next_step)


def add_layer_counts(model: AssignmentModel) -> None:
    """Make `counts` add up the layers of a kind placed on a stage at a bitwidth."""
    terms: dict[tuple[int, int], list[pulp.LpVariable]] = {}
    for (layer, stage, choice), variable in model.placed.items():
        cell = int(model.problem.kind_of_layer[layer]) * len(model.problem.bitwidths) + choice
        terms.setdefault((stage, cell), []).append(variable)
    for stage, row in enumerate(model.counts):
        for cell, count in enumerate(row):
            held = pulp.lpSum(terms.get((stage, cell), []))
            model.programme.addConstraint(held == count)


def add_memory_limit(model: AssignmentModel, memory_share: FloatArray) -> None:
    """Make the layers of a stage fit its memories (eq. 12-13)."""
    for share, memory in zip(memory_share, model.problem.memories, strict=True):
        for stage, row in enumerate(model.counts):
            each, limit = memory.layer_bytes[stage], memory.limit_bytes[stage]
            unit = memory_unit_bytes(each, limit)
            weighed = pulp.lpSum(
                float(size) * count for size, count in zip(each / unit, row, strict=True)
            )
            model.programme.addConstraint(weighed <= float(limit / unit * share[stage]))


def add_latency(model: AssignmentModel) -> pulp.LpAffineExpression:
    """Add a variable above every form of each maximum (eq. 5-8); the latency in model units."""
    problem, form, unit = model.problem, latency_form(model.problem), model.scale_s
    constant_s = form.constant_s + form.prefill_each * problem.fixed_prefill_s.sum()
    constant_s += form.decode_each * problem.fixed_decode_s.sum()
    variable = model.programme.add_variable
    # A fixed variable, so that the solver's relative gap is on the whole.
    constant = variable("constant", constant_s / unit, constant_s / unit)
    prefill = variable("slowest_prefill", form.prefill_max * form.prefill_floor_s / unit)
    decode = variable("decode_rounds", form.decode_max * form.decode_floor_s / unit)
    for slowest, weight, layer_s, fixed_s in (
        (prefill, form.prefill_max / unit, problem.prefill_s, problem.fixed_prefill_s),
        (decode, form.decode_max / unit, problem.decode_s, problem.fixed_decode_s),
    ):
        for stage in range(problem.stages) if weight else ():
            held_s = _weighed(model, weight * layer_s, [stage])
            model.programme.addConstraint(slowest - held_s >= weight * float(fixed_s[stage]))
    if form.round_trips:
        weight = form.round_trips / unit
        held_s = _weighed(model, weight * problem.decode_s)
        trip_s = float(problem.fixed_decode_s.sum()) + form.trip_s
        model.programme.addConstraint(decode - held_s >= weight * trip_s)
    each_s = form.prefill_each * problem.prefill_s + form.decode_each * problem.decode_s
    return pulp.lpSum([constant, prefill, decode]) + _weighed(model, each_s / unit)


def _declare(
    problem: AssignmentProblem, windows: Sequence[Window], scale_s: float
) -> AssignmentModel:
    programme = pulp.LpProblem("assignment", pulp.LpMinimize)
    stages, cells = problem.prefill_s.shape
    before: list[list[Step]] = []
    for layer in range(problem.layers):
        steps = [_step(programme, layer, stage, windows) for stage in range(stages)]
        before.append(before[-1] if layer in problem.joined else steps)
    usable = problem.by_layer(problem.available)
    placed = {
        (layer, stage, choice): programme.add_variable(f"placed_{layer}_{stage}_{choice}", 0, 1)
        for layer, steps in enumerate(before)
        for stage in range(stages)
        if _may_lie(steps, stage)
        for choice in range(len(problem.bitwidths))
        if usable[stage, layer, choice]
    }
    counts = [
        [
            programme.add_variable(
                f"count_{stage}_{cell}", 0, _most(problem, stage, cell), pulp.LpInteger
            )
            for cell in range(cells)
        ]
        for stage in range(stages)
    ]
    return AssignmentModel(problem, scale_s, programme, before, placed, counts)


def _step(programme: pulp.LpProblem, layer: int, stage: int, windows: Sequence[Window]) -> Step:
    if stage == len(windows) or layer < windows[stage][0]:
        return 1
    if layer >= windows[stage][1]:
        return 0
    return programme.add_variable(f"before_{layer}_{stage}", cat=pulp.LpBinary)


def _may_lie(steps: Sequence[Step], stage: int) -> bool:
    reached = not (isinstance(steps[stage], int) and steps[stage] == 0)
    passed = stage > 0 and isinstance(steps[stage - 1], int) and steps[stage - 1] == 1
    return reached and not passed


def _most(problem: AssignmentProblem, stage: int, cell: int) -> int:
    if not problem.available[stage, cell] or problem.memory_bytes[stage] < 0:
        return 0
    return min(
        int(
            whole_layers(memory.layer_bytes[stage, cell], memory.limit_bytes[stage], problem.layers)
        )
        for memory in problem.memories
    )


def _quality_terms(model: AssignmentModel) -> pulp.LpAffineExpression:
    cost = model.problem.theta * model.problem.sensitivity / model.scale_s
    cells = model.placed.items()
    return pulp.LpAffineExpression([(each, float(cost[i, b])) for (i, _, b), each in cells])


def _weighed(
    model: AssignmentModel, weights: FloatArray, stages: Sequence[int] | None = None
) -> pulp.LpAffineExpression:
    """Sum of counts times `weights` [N, C * K] on all or some stages, without the zeros."""
    terms = [
        (count, float(weight))
        for stage in (range(len(model.counts)) if stages is None else stages)
        for count, weight in zip(model.counts[stage], weights[stage], strict=True)
        if weight
    ]
    return pulp.LpAffineExpression(terms)
