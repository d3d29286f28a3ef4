"""The linear relaxation of an assignment by kinds of stages: bounds, prices, and slowest stages.

As `planner.optimiser.milp.relaxation`, but stages that are alike share their columns (the optimum
is symmetric), and so do layers of equal sensitivity: small enough to solve for every candidate of a
search.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from planner.optimiser.boxes.multipliers import PricedProblem, Prices, onto_simplex
from planner.optimiser.milp.relaxation import LINPROG_INFEASIBLE, MEMORY_UNITS, OBJECTIVE_UNITS
from planner.optimiser.problem import FloatArray

SLACK = 1e-6  # relative; above the solver's tolerance


@dataclass(frozen=True, eq=False)
class KindSolution:
    """The optimum: a bound in seconds, and prices that prove about as much."""

    bound: float
    prices: Prices


@dataclass(frozen=True)
class SlowestStages:
    """What the slowest prefill and decode must at least and may at most be, in seconds."""

    prefill_least: float
    prefill_most: float
    decode_least: float
    decode_most: float


@dataclass(frozen=True, eq=False)
class _Outcome:
    """What the solver found: the point and its value, the prices of the upper limits."""

    infeasible: bool
    point: FloatArray | None
    value: float
    prices: FloatArray


class KindProgramme:
    """Columns: counts [Q * K], bits of the distinct layers [U * K], both bottlenecks' costs."""

    def __init__(self, priced: PricedProblem) -> None:
        self._priced = priced
        weights, kinds = priced.weights, priced.kinds
        self._scale = OBJECTIVE_UNITS / _typical_objective(priced)
        distinct, repeats = np.unique(priced.loss_s, axis=0, return_counts=True)
        self._cells, losses = priced.prefill_s.size, distinct.size
        self._columns = self._cells + losses + 2
        each = priced.prefill_s + weights.decode_each * priced.decode_s
        self._cost = np.concatenate([each.ravel(), distinct.ravel(), np.zeros(2)]) * self._scale
        self._cost[-2:] = 1.0
        self._upper, self._limit, self._memory_unit = self._upper_rows()
        self._equal = self._equal_rows(len(distinct))
        self._value = np.concatenate([repeats, np.zeros(priced.prefill_s.shape[1])])
        most = np.where(np.isfinite(priced.bytes), np.inf, 0.0).ravel().tolist()
        prefill = weights.prefill_max * weights.prefill_floor_s * self._scale
        decode = weights.decode_max * weights.decode_floor_s * self._scale
        least = [0.0] * (self._columns - 2) + [prefill, decode]
        self._bounds = list(zip(least, most + [np.inf] * (losses + 2), strict=True))
        fixed = priced.fixed_prefill_s + weights.decode_each * priced.fixed_decode_s
        self._constant = weights.constant_s + float(kinds.count @ fixed)

    def minimum(self) -> KindSolution:
        """The least objective of a feasible problem; even prices should the solver fail."""
        weights, count = self._priced.weights, self._priced.kinds.count
        kinds = count.size
        result = self._solve(self._cost, self._upper, self._limit)
        dual = np.maximum(result.prices, 0.0)
        bound = 0.0
        if result.point is not None:
            bound = result.value / self._scale + self._constant
        trip = min(1.0, float(dual[3 * kinds])) if weights.round_trips else 0.0
        prefill, decode = dual[:kinds] * weights.prefill_max, dual[kinds : 2 * kinds]
        prices = Prices(
            onto_simplex(prefill, count, weights.prefill_max),
            onto_simplex(decode * weights.decode_max, count, (1 - trip) * weights.decode_max),
            dual[2 * kinds : 3 * kinds] / self._memory_unit / self._scale,
            trip,
        )
        return KindSolution(bound, prices)

    def slowest_stages(self, cutoff: float) -> SlowestStages | None:
        """Limits on the slowest stages of any assignment of at most `cutoff` seconds, if any."""
        weights = self._priced.weights
        limit = (cutoff - self._constant) * self._scale + SLACK * OBJECTIVE_UNITS
        upper = np.vstack([self._upper, self._cost])
        limits = np.append(self._limit, limit)
        found = []
        for column, weight in ((-2, weights.prefill_max), (-1, weights.decode_max)):
            for sign in (1.0, -1.0):
                cost = np.zeros(self._columns)
                cost[column] = sign
                if not weight:
                    found.append(0.0 if sign > 0 else np.inf)
                    continue
                result = self._solve(cost, upper, limits)
                if result.infeasible:
                    return None
                open_end = 0.0 if sign > 0 else np.inf
                value = open_end if result.point is None else sign * result.value
                found.append(value * (1 - sign * SLACK) / (weight * self._scale))
        if weights.round_trips:
            found[2] = 0.0  # the column may be above the slowest stage: one trip round
        return SlowestStages(
            max(found[0], weights.prefill_floor_s),
            found[1],
            max(found[2], weights.decode_floor_s),
            found[3],
        )

    def _solve(self, cost: FloatArray, upper: FloatArray, limit: FloatArray) -> _Outcome:
        """A minimum under rows of upper limits."""
        found = linprog(
            cost, upper, limit, self._equal, self._value, self._bounds, method="highs-ds"
        )
        if found.x is None or found.fun is None:
            return _Outcome(found.status == LINPROG_INFEASIBLE, None, 0.0, np.zeros(len(limit)))
        return _Outcome(False, found.x, float(found.fun), -found.ineqlin.marginals)

    def _upper_rows(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Both bottlenecks and memory of each kind, the trip round, a layer on either end."""
        priced, weights = self._priced, self._priced.weights
        kinds, choices = priced.prefill_s.shape
        count = priced.kinds.count.astype(np.float64)
        upper, limit = np.zeros((3 * kinds + 3, self._columns)), np.zeros(3 * kinds + 3)
        size = np.where(np.isfinite(priced.bytes), priced.bytes, 0.0)
        unit = np.maximum(np.maximum(priced.memory_bytes, size.max(axis=1)), 1.0) / MEMORY_UNITS
        prefill, decode = weights.prefill_max * self._scale, weights.decode_max * self._scale
        trip = weights.round_trips * self._scale
        for kind in range(kinds):
            cell = slice(kind * choices, (kind + 1) * choices)
            upper[kind, cell] = prefill * priced.prefill_s[kind]
            upper[kinds + kind, cell] = decode * priced.decode_s[kind]
            upper[2 * kinds + kind, cell] = size[kind] / unit[kind]
            upper[3 * kinds, cell] = trip * priced.decode_s[kind]
        rows = np.arange(kinds)
        upper[rows, -2] = upper[kinds + rows, -1] = -count
        upper[3 * kinds, -1] = -1.0
        limit[:kinds] = -prefill * count * priced.fixed_prefill_s
        limit[kinds : 2 * kinds] = -decode * count * priced.fixed_decode_s
        limit[2 * kinds : 3 * kinds] = count * priced.memory_bytes / unit
        limit[3 * kinds] = -trip * (float(count @ priced.fixed_decode_s) + weights.trip_s)
        for row, end in ((-2, 0), (-1, -1)):
            kind = int(priced.kinds.of_stage[end])
            upper[row, kind * choices : (kind + 1) * choices] = limit[row] = -1.0
        return upper, limit, unit

    def _equal_rows(self, distinct: int) -> FloatArray:
        """One bitwidth a layer, and as many layers of a bitwidth as the stages hold of it."""
        choices, cells = self._priced.prefill_s.shape[1], self._cells
        rows = np.zeros((distinct + choices, self._columns))
        for row in range(distinct):
            rows[row, cells + row * choices : cells + (row + 1) * choices] = 1.0
        for choice in range(choices):
            rows[distinct + choice, choice:cells:choices] = -1.0
            rows[distinct + choice, cells + choice : cells + distinct * choices : choices] = 1.0
        return rows


def _typical_objective(priced: PricedProblem) -> float:
    """A positive number of seconds of the objective's size: layers spread evenly."""
    problem, weights = priced.problem, priced.weights
    each = problem.layers / problem.stages
    prefill = float(each * priced.prefill_s.mean() + priced.fixed_prefill_s.max())
    decode = float(each * priced.decode_s.mean() + priced.fixed_decode_s.max())
    stages = problem.stages
    seconds = weights.seconds(prefill, decode, stages * prefill, stages * decode)
    seconds += float(priced.loss_s.mean(axis=1).sum())
    return seconds if seconds > 0 else 1.0
