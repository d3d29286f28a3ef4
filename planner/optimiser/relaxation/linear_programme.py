"""The linear relaxation of an assignment: how many layers each kind of stage holds, in fractions.

A layer's time and bytes depend on its stage and bitwidth only, so fractional counts of layers per
stage and bitwidth say all about latency and memory; which layers get which bits is a transport
problem that ignores where they lie. Every assignment is a point of this programme, so its minimum
bounds LLM-PQ eq. 4 from below. Stages of one kind share their columns (the optimum is symmetric),
and so do layers of equal sensitivity. Exact search and device orders group equal stages
(`stage_kinds`); the integer programme's windows need every stage alone (`each_stage_alone`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.optimiser.problem import FloatArray
from planner.optimiser.relaxation.linear_model import LinearModel
from planner.optimiser.relaxation.prices import PricedProblem, Prices, onto_simplex
from planner.optimiser.relaxation.scaling import (
    OBJECTIVE_UNITS,
    memory_unit_bytes,
    typical_objective_s,
)

SLACK = 1e-6  # relative; above the solver's tolerance
PREFILL_COLUMN, DECODE_COLUMN = -2, -1  # what the slowest prefill stage and decoding cost


@dataclass(frozen=True, eq=False)
class LinearOptimum:
    """The least objective: a bound in seconds, prices that prove about as much, layers held [Q]."""

    bound: float
    prices: Prices
    held: FloatArray


@dataclass(frozen=True)
class SlowestStages:
    """The most seconds of the slowest prefill and decode stage."""

    prefill_most: float
    decode_most: float


class LinearProgramme:
    """The programme of one problem.

    Columns: counts [Q * K], bits of the U distinct layers [U * K], both bottlenecks' costs.
    """

    def __init__(self, priced: PricedProblem) -> None:
        self._priced = priced
        form, kinds = priced.form, priced.kinds
        self._scale = OBJECTIVE_UNITS / typical_objective_s(priced.problem)
        distinct, repeats = np.unique(priced.loss_s, axis=0, return_counts=True)
        self._cells, losses = priced.prefill_s.size, distinct.size
        self._columns = self._cells + losses + 2
        each = form.prefill_each * priced.prefill_s + form.decode_each * priced.decode_s
        self._cost = np.concatenate([each.ravel(), distinct.ravel(), np.zeros(2)]) * self._scale
        self._cost[[PREFILL_COLUMN, DECODE_COLUMN]] = 1.0
        upper, limit, self._memory_unit = self._upper_rows()
        value = np.concatenate([repeats, np.zeros(priced.prefill_s.shape[1])])
        least, most = np.zeros(self._columns), np.full(self._columns, np.inf)
        least[PREFILL_COLUMN] = form.prefill_max * form.prefill_floor_s * self._scale
        least[DECODE_COLUMN] = form.decode_max * form.decode_floor_s * self._scale
        most[: self._cells] = np.where(np.isfinite(priced.bytes), np.inf, 0.0).ravel()
        self._uppers = len(limit)
        self._model = LinearModel(
            np.vstack([upper, self._cost, self._equal_rows(len(distinct))]),
            np.concatenate([np.full(self._uppers + 1, -np.inf), value]),
            np.concatenate([limit, [np.inf], value]),
            (least, most),
        )
        fixed = form.prefill_each * priced.fixed_prefill_s
        fixed = fixed + form.decode_each * priced.fixed_decode_s
        self._constant = form.constant_s + float(kinds.count @ fixed)

    def minimum(self) -> LinearOptimum:
        """Find the least objective of a feasible problem.

        Should the solver fail, the bound is zero, and prices and layers are spread evenly.
        """
        form, count = self._priced.form, self._priced.kinds.count
        kinds = count.size
        self._model.limit_row(self._uppers, np.inf)
        result = self._model.minimum(self._cost)
        dual = np.maximum(-result.marginals[: self._uppers], 0.0)
        bound, held = 0.0, self._priced.problem.layers * count / count.sum()
        if result.point is not None:
            bound = result.value / self._scale + self._constant
            held = result.point[: self._cells].reshape(kinds, -1).sum(axis=1)
        trip = min(1.0, float(dual[3 * kinds])) if form.round_trips else 0.0
        prefill, decode = dual[:kinds] * form.prefill_max, dual[kinds : 2 * kinds]
        prices = Prices(
            onto_simplex(prefill, count, form.prefill_max),
            onto_simplex(decode * form.decode_max, count, (1 - trip) * form.decode_max),
            dual[2 * kinds : 3 * kinds] / self._memory_unit / self._scale,
            trip,
        )
        return LinearOptimum(bound, prices, held)

    def extremes(self, cost: FloatArray, cutoff: float) -> tuple[float, float] | None:
        """The least and the most of `cost` times the columns, over points of at most `cutoff`
        seconds (plus the solver's slack); None where there is no such point.

        Infinite where the solver fails.
        """
        self._model.limit_row(self._uppers, self._limit(cutoff))
        found = []
        for sign in (1.0, -1.0):
            outcome = self._model.minimum(sign * cost)
            if outcome.infeasible:
                return None
            found.append(-sign * np.inf if outcome.point is None else sign * outcome.value)
        return found[0], found[1]

    def _limit(self, cutoff: float) -> float:
        """The limit of the objective's row for `cutoff` seconds."""
        return (cutoff - self._constant) * self._scale + SLACK * OBJECTIVE_UNITS

    def slowest_stages(self, cutoff: float) -> SlowestStages | None:
        """Limits on the slowest stages of any assignment of at most `cutoff` seconds, if any."""
        form, found = self._priced.form, []
        self._model.limit_row(self._uppers, self._limit(cutoff))
        for column, weight in (
            (PREFILL_COLUMN, form.prefill_max),
            (DECODE_COLUMN, form.decode_max),
        ):
            if not weight:
                found.append(np.inf)
                continue
            cost = np.zeros(self._columns)
            cost[column] = -1.0
            outcome = self._model.minimum(cost)
            if outcome.infeasible:
                return None
            most = np.inf if outcome.point is None else -outcome.value
            found.append(most * (1 + SLACK) / (weight * self._scale))
        return SlowestStages(*found)

    def layers_before(self, kind: int) -> FloatArray:
        """The cost row that adds up all layers on the kinds before `kind`."""
        row = np.zeros(self._columns)
        row[: kind * self._priced.prefill_s.shape[1]] = 1.0
        return row

    def _upper_rows(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Rows of each kind's bottlenecks and memory, the trip round, and a layer on either end."""
        priced, form = self._priced, self._priced.form
        kinds, choices = priced.prefill_s.shape
        count = priced.kinds.count.astype(np.float64)
        upper, limit = np.zeros((3 * kinds + 3, self._columns)), np.zeros(3 * kinds + 3)
        size = np.where(np.isfinite(priced.bytes), priced.bytes, 0.0)
        unit = memory_unit_bytes(size, priced.memory_bytes)
        prefill, decode = form.prefill_max * self._scale, form.decode_max * self._scale
        trip = form.round_trips * self._scale
        rows = np.arange(kinds)
        cells = rows[:, np.newaxis], np.arange(self._cells).reshape(kinds, choices)
        upper[:kinds][cells] = prefill * priced.prefill_s
        upper[kinds : 2 * kinds][cells] = decode * priced.decode_s
        upper[2 * kinds : 3 * kinds][cells] = size / unit[:, np.newaxis]
        upper[3 * kinds, : self._cells] = trip * priced.decode_s.ravel()
        upper[rows, PREFILL_COLUMN] = upper[kinds + rows, DECODE_COLUMN] = -count
        upper[3 * kinds, DECODE_COLUMN] = -1.0
        limit[:kinds] = -prefill * count * priced.fixed_prefill_s
        limit[kinds : 2 * kinds] = -decode * count * priced.fixed_decode_s
        limit[2 * kinds : 3 * kinds] = count * priced.memory_bytes / unit
        limit[3 * kinds] = -trip * (float(count @ priced.fixed_decode_s) + form.trip_s)
        for row, end in ((-2, 0), (-1, -1)):
            kind = int(priced.kinds.of_stage[end])
            upper[row, kind * choices : (kind + 1) * choices] = limit[row] = -1.0
        return upper, limit, unit

    def _equal_rows(self, distinct: int) -> FloatArray:
        """Rows for one bitwidth a layer, and equal counts of layers and stages at each bitwidth."""
        choices, cells = self._priced.prefill_s.shape[1], self._cells
        rows = np.zeros((distinct + choices, self._columns))
        own = cells + np.arange(distinct * choices).reshape(distinct, choices)
        rows[np.arange(distinct)[:, np.newaxis], own] = 1.0
        for choice in range(choices):
            rows[distinct + choice, choice:cells:choices] = -1.0
            rows[distinct + choice, cells + choice : cells + distinct * choices : choices] = 1.0
        return rows
