"""A small linear relaxation of the assignment: how many layers a stage holds at each bitwidth.

A layer's time and bytes depend on its stage and bitwidth only, so counts[j, b] (fractional here)
say all about latency and memory; which layers get which bits is a transport problem that ignores
where they lie. Every assignment is a point of this relaxation, so its minimum bounds LLM-PQ eq. 4
from below, and the first layers of the stages can be confined to windows outside which nothing is
better than a known plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from planner.optimiser.capacity import is_feasible
from planner.optimiser.milp.objective import LinearLatency, linear_latency, objective_scale
from planner.optimiser.problem import AssignmentProblem, FloatArray

# Sizes in a scaled model. Solvers keep to 1e-6 (1e-7 in linear programmes) of such a unit.
OBJECTIVE_UNITS = 10.0
MEMORY_UNITS = 1000.0
CUTOFF_SLACK = 1e-7  # relative; above the LP solver's tolerance
LINPROG_INFEASIBLE = 2  # scipy.optimize.linprog's status
COUNT_SLACK = 1e-5  # layers; above the LP solver's tolerance on a count


@dataclass(frozen=True)
class Window:
    """A stage boundary lies between these two first layers, both included."""

    least: int
    most: int


@dataclass(frozen=True)
class Relaxed:
    """The relaxation's optimum: a lower bound in seconds, and its boundaries [N-1]."""

    bound: float
    boundaries: tuple[float, ...]


class CountRelaxation:
    """The linear programme of one problem, built once and solved for several objectives.

    Columns: counts [N * K], layer bits [L * K], one per bottleneck. Values are scaled so that the
    objective is about `OBJECTIVE_UNITS` and every memory `MEMORY_UNITS`, which makes the solver's
    absolute tolerances harmless.
    """

    def __init__(self, problem: AssignmentProblem) -> None:
        self.problem = problem
        self.scale_s = objective_scale(problem) / OBJECTIVE_UNITS
        self._latency = linear_latency(problem)
        self._cost = _cost_row(problem, self._latency, self.scale_s)
        columns = self._cost.size
        self._upper, self._upper_limit = _upper_rows(problem, self._latency, self.scale_s, columns)
        self._equal, self._equal_value = _equal_rows(problem, columns)
        self._bounds = _column_bounds(problem, len(self._latency.bottlenecks))

    def minimum(self) -> Relaxed:
        """The least objective of any fractional assignment of a feasible problem.

        Costs are never negative: should the solver fail, zero and even boundaries are returned.
        """
        result = linprog(
            self._cost,
            self._upper,
            self._upper_limit,
            self._equal,
            self._equal_value,
            self._bounds,
            method="highs",
        )
        stages, choices = self.problem.prefill_s.shape
        if result.x is None or result.fun is None:
            even = np.arange(1, stages) * self.problem.layers / stages
            return Relaxed(0.0, tuple(even.tolist()))
        held = result.x[: stages * choices].reshape(stages, choices).sum(axis=1)
        return Relaxed(
            bound=float(result.fun) * self.scale_s + self._latency.constant_s,
            boundaries=tuple(np.cumsum(held)[:-1].tolist()),
        )

    def boundary_windows(self, cutoff: float) -> tuple[Window, ...] | None:
        """Where each of the N-1 boundaries lies in any assignment of at most `cutoff` seconds.

        None if no assignment is that good.
        """
        limit = (cutoff * (1 + CUTOFF_SLACK) - self._latency.constant_s) / self.scale_s
        upper = np.vstack([self._upper, self._cost])
        limits = np.append(self._upper_limit, limit)
        windows = []
        for boundary in range(1, self.problem.stages):
            least = self._held_before(boundary, 1.0, upper, limits)
            most = self._held_before(boundary, -1.0, upper, limits)
            if math.isinf(least) or math.isinf(most):
                return None
            window = Window(
                max(1, math.ceil(least - COUNT_SLACK)),
                min(self.problem.layers - 1, math.floor(most + COUNT_SLACK)),
            )
            if window.least > window.most:
                return None
            windows.append(window)
        return tuple(windows)

    def _held_before(
        self, boundary: int, sign: float, upper: FloatArray, limits: FloatArray
    ) -> float:
        """The least (sign 1) or most (sign -1) layers on the stages before `boundary`.

        Infinite where no point is good enough; the widest answer should the solver fail.
        """
        cost = np.zeros_like(self._cost)
        cost[: boundary * self.problem.prefill_s.shape[1]] = sign
        result = linprog(
            cost, upper, limits, self._equal, self._equal_value, self._bounds, method="highs"
        )
        if result.status == LINPROG_INFEASIBLE:
            return sign * math.inf
        if result.x is None or result.fun is None:
            return 0.0 if sign > 0 else float(self.problem.layers)
        return sign * float(result.fun)


def lower_bound(problem: AssignmentProblem) -> float:
    """A cheap lower bound (seconds) on the objective of every assignment; infinite if none fits."""
    if not is_feasible(problem):
        return math.inf
    return CountRelaxation(problem).minimum().bound


def memory_row(problem: AssignmentProblem, stage: int) -> tuple[FloatArray, float]:
    """Coefficients [K] and limit of a stage's memory, scaled to about `MEMORY_UNITS`."""
    memory = float(problem.memory_bytes[stage])
    unit = max(memory, float(problem.layer_bytes[stage].max()), 1.0) / MEMORY_UNITS
    return problem.layer_bytes[stage] / unit, memory / unit


def _cost_row(problem: AssignmentProblem, latency: LinearLatency, scale_s: float) -> FloatArray:
    """The objective without its constant, over all columns; a bottleneck's column is its cost."""
    return np.concatenate(
        [
            latency.per_layer_s.ravel() / scale_s,
            problem.theta * problem.sensitivity.ravel() / scale_s,
            np.ones(len(latency.bottlenecks)),
        ]
    )


def _upper_rows(
    problem: AssignmentProblem, latency: LinearLatency, scale_s: float, columns: int
) -> tuple[FloatArray, FloatArray]:
    """Memory of each stage, a layer on the first and the last stage, and the bottlenecks."""
    stages, choices = problem.prefill_s.shape
    rows: list[FloatArray] = []
    limits: list[float] = []

    def add(counts: FloatArray, limit: float) -> FloatArray:
        rows.append(np.concatenate([counts.ravel(), np.zeros(columns - counts.size)]))
        limits.append(limit)
        return rows[-1]

    for stage in range(stages):
        at_stage = np.zeros((stages, choices))
        at_stage[stage], limit = memory_row(problem, stage)
        add(at_stage, limit)
        if stage in (0, stages - 1):
            add(-np.sign(at_stage + (np.arange(stages) == stage)[:, np.newaxis]), -1.0)
    for index, term in enumerate(latency.bottlenecks):
        factor = term.weight / scale_s
        column = columns - len(latency.bottlenecks) + index
        for row_s, start_s in zip(term.row_s, term.start_s, strict=True):
            add(factor * row_s, -factor * float(start_s))[column] = -1.0
    return np.stack(rows), np.array(limits)


def _equal_rows(problem: AssignmentProblem, columns: int) -> tuple[FloatArray, FloatArray]:
    """One bitwidth a layer, and as many layers of a bitwidth as the stages hold of it."""
    stages, choices = problem.prefill_s.shape
    layers, cells = problem.layers, stages * choices
    rows = np.zeros((layers + choices, columns))
    for layer in range(layers):
        rows[layer, cells + layer * choices : cells + (layer + 1) * choices] = 1.0
    for choice in range(choices):
        rows[layers + choice, choice:cells:choices] = -1.0
        rows[layers + choice, cells + choice : cells + layers * choices : choices] = 1.0
    return rows, np.concatenate([np.ones(layers), np.zeros(choices)])


def _column_bounds(problem: AssignmentProblem, bottlenecks: int) -> list[tuple[float, float]]:
    """Least and most value of every column."""
    counts = np.where(problem.available.ravel(), float(problem.layers), 0.0)
    most = np.concatenate([counts, np.ones(problem.sensitivity.size), np.full(bottlenecks, np.inf)])
    return [(0.0, float(value)) for value in most]
