"""The linear relaxation: how many layers each kind of stage holds in each cell, in fractions.
Every assignment is a point of this programme, so its minimum bounds LLM-PQ eq. 4 from below. Stages
of one kind share columns, and so do layers of one kind and equal sensitivity; the integer
programme's windows need every stage alone (`each_stage_alone`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import highspy
import numpy as np

from planner.optimiser.feasibility import is_feasible
from planner.optimiser.prices import PathBound, PricedProblem, Prices, onto_simplex
from planner.optimiser.problem import (
    AssignmentProblem,
    FloatArray,
    IntArray,
    typical_objective_s,
)

# Solvers keep to 1e-6 (1e-7 in linear programmes) of a model's unit, whatever that is.
OBJECTIVE_UNITS = 10.0  # about what the objective is in a scaled model
MEMORY_UNITS = 1000.0  # about what each memory is
SLACK = 1e-6  # relative; above the solver's tolerance
ROUNDING = 1e-8  # relative; above the rounding of sums of seconds
PREFILL_COLUMN, DECODE_COLUMN = -2, -1  # what the slowest prefill stage and decoding cost
HIGHS_OPTIONS: dict[str, bool | int | str] = {
    "output_flag": False,
    "threads": 1,
    "solver": "simplex",
}


@dataclass(frozen=True, eq=False)
class RelaxedProblem:
    """A problem with its prices and a lower bound (seconds) on every assignment's objective."""

    priced: PricedProblem
    programme: LinearProgramme
    prices: Prices
    path: PathBound
    bound: float


def relax(problem: AssignmentProblem) -> RelaxedProblem:
    """Bound and price a feasible problem; takes milliseconds."""
    priced = PricedProblem(problem)
    programme = LinearProgramme(priced)
    bound, prices, _ = programme.minimum()
    path = priced.path_bound(prices)
    return RelaxedProblem(
        priced, programme, prices, path, max(bound, path.bound, 0.0) * (1 - ROUNDING)
    )


def lower_bound(problem: AssignmentProblem) -> float:
    """A lower bound (seconds) on the objective of every assignment; infinite if none fits."""
    return relax(problem).bound if is_feasible(problem) else math.inf


def memory_unit_bytes(layer_bytes: FloatArray, memory_bytes: FloatArray) -> FloatArray:
    """Bytes of a unit of each memory [N], for layers of `layer_bytes` [N, K]."""
    greatest = np.maximum(memory_bytes, layer_bytes.max(axis=-1))
    return np.asarray(np.maximum(greatest, 1.0) / MEMORY_UNITS)


class LinearProgramme:
    """Columns: counts [Q * C * K], bits of the U distinct layers [U * K], both bottlenecks."""

    def __init__(self, priced: PricedProblem) -> None:
        self._priced = priced
        form, kinds = priced.form, priced.kinds
        self._scale = OBJECTIVE_UNITS / typical_objective_s(priced.problem)
        layers = np.column_stack([priced.problem.kind_of_layer, priced.loss_s])
        rows, repeats = distinct_rows(layers)
        kind_of_row, distinct = rows[:, 0].astype(np.int64), rows[:, 1:]
        self._cells, losses = priced.prefill_s.size, distinct.size
        self._columns = self._cells + losses + 2
        each = form.prefill_each * priced.prefill_s + form.decode_each * priced.decode_s
        self._cost = np.concatenate([each.ravel(), distinct.ravel(), np.zeros(2)]) * self._scale
        self._cost[[PREFILL_COLUMN, DECODE_COLUMN]] = 1.0
        upper, limit, self._memory_unit = self._upper_rows()
        for rows, most in (self._end_rows(), self._share_rows(), self._host_rows()):
            upper, limit = np.vstack([upper, rows]), np.concatenate([limit, most])
        value = np.concatenate([repeats, np.zeros(priced.prefill_s.shape[1])])
        least, most = np.zeros(self._columns), np.full(self._columns, np.inf)
        least[PREFILL_COLUMN] = form.prefill_max * form.prefill_floor_s * self._scale
        least[DECODE_COLUMN] = form.decode_max * form.decode_floor_s * self._scale
        most[: self._cells] = np.where(np.isfinite(priced.bytes), np.inf, 0.0).ravel()
        self._uppers = len(limit)
        self._model = LinearModel(
            np.vstack([upper, self._cost, self._equal_rows(kind_of_row)]),
            np.concatenate([np.full(self._uppers + 1, -np.inf), value]),
            np.concatenate([limit, [np.inf], value]),
            (least, most),
        )
        fixed = form.prefill_each * priced.fixed_prefill_s
        fixed = fixed + form.decode_each * priced.fixed_decode_s
        self._constant = form.constant_s + float(kinds.count @ fixed)

    def minimum(self) -> tuple[float, Prices, FloatArray]:
        """The least objective as a bound in seconds, prices that prove about as much, and layers
        held [Q]; should the solver fail, zero and evenly spread ones.
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
            self._host_prices(dual),
            trip,
        )
        return bound, prices, held

    def extremes(self, cost: FloatArray, cutoff: float) -> tuple[float, float] | None:
        """The least and most of `cost` over points of at most `cutoff` seconds; None where none is,
        infinite where the solver fails.
        """
        self._limit_objective(cutoff)
        found = []
        for sign in (1.0, -1.0):
            outcome = self._model.minimum(sign * cost)
            if outcome.infeasible:
                return None
            found.append(-sign * np.inf if outcome.point is None else sign * outcome.value)
        return found[0], found[1]

    def slowest_stages(self, cutoff: float) -> tuple[float, float] | None:
        """The most seconds of the slowest prefill and decode stage within `cutoff`, if any is."""
        form, found = self._priced.form, []
        self._limit_objective(cutoff)
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
        return found[0], found[1]

    def layers_before(self, kind: int) -> FloatArray:
        """The cost row that adds up all layers on the kinds before `kind`."""
        row = np.zeros(self._columns)
        row[: kind * self._priced.prefill_s.shape[1]] = 1.0
        return row

    def _limit_objective(self, cutoff: float) -> None:
        most = (cutoff - self._constant) * self._scale + SLACK * OBJECTIVE_UNITS
        self._model.limit_row(self._uppers, most)

    def _upper_rows(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Rows of bottlenecks and memory, and the trip round; limits; units."""
        priced, form = self._priced, self._priced.form
        kinds, choices = priced.prefill_s.shape
        count = priced.kinds.count.astype(np.float64)
        upper, limit = np.zeros((3 * kinds + 1, self._columns)), np.zeros(3 * kinds + 1)
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
        return upper, limit, unit

    def _end_rows(self) -> tuple[FloatArray, FloatArray]:
        """Rows that keep on the first and the last stage the layers, of each kind, that lie before
        or behind all boundaries between stages; limits.
        """
        problem, before = self._priced.problem, self._priced.problem.kinds_before
        borders = problem.open_boundaries
        held = before[borders[1]], before[-1] - before[borders[-2]]
        every = np.arange(self._cells).reshape(-1, problem.kinds, len(problem.bitwidths))
        rows, limit = list[FloatArray](), list[float]()
        for stage, counts in zip(self._priced.kinds.of_stage[[0, -1]], held, strict=True):
            for kind in np.flatnonzero(counts).tolist():
                rows.append(np.zeros(self._columns))
                rows[-1][every[stage, kind]] = -1.0
                limit.append(-float(counts[kind]))
        return np.array(rows), np.array(limit)

    def _share_rows(self) -> tuple[FloatArray, FloatArray]:
        """Rows that keep a stage's layers of each kind near the kind's share in all, as the runs
        do; limits. Without them a stage could take the layers of one kind only.
        """
        problem, count = self._priced.problem, self._priced.kinds.count
        stages, width, kinds = count.size, len(problem.bitwidths), problem.kinds
        rows = np.zeros((2 * (kinds - 1), stages, self._columns))
        limit = np.zeros((2 * (kinds - 1), stages))
        every = np.arange(self._cells).reshape(stages, kinds, width)
        open_ones = problem.open_boundaries
        for kind in range(kinds - 1):
            before = problem.kinds_before[open_ones, kind]
            share = float(before[-1]) / problem.layers
            more = before - share * open_ones
            # the most a run has more than its share, and the most it has less
            rise = float((more - np.minimum.accumulate(more)).max())
            fall = float((np.maximum.accumulate(more) - more).max())
            for row, sign, most in ((2 * kind, 1.0, rise), (2 * kind + 1, -1.0, fall)):
                for stage in range(stages):
                    rows[row, stage, every[stage]] = -sign * share
                    rows[row, stage, every[stage, kind]] += sign
                limit[row] = count * most
        return rows.reshape(-1, self._columns), limit.ravel()

    def _host_rows(self) -> tuple[FloatArray, FloatArray]:
        """Rows of the hosts' memory, if layers take any, and limits; the last of all."""
        priced, count = self._priced, self._priced.kinds.count
        if len(priced.problem.memories) == 1:
            return np.zeros((0, self._columns)), np.zeros(0)
        rows = np.zeros((count.size, self._columns))
        unit = memory_unit_bytes(priced.host_bytes, priced.host_memory_bytes)
        cells = np.arange(self._cells).reshape(count.size, -1)
        rows[np.arange(count.size)[:, np.newaxis], cells] = priced.host_bytes / unit[:, np.newaxis]
        return rows, count * priced.host_memory_bytes / unit

    def _host_prices(self, dual: FloatArray) -> FloatArray:
        priced, kinds = self._priced, self._priced.kinds.count.size
        if len(priced.problem.memories) == 1:
            return np.zeros(kinds)
        unit = memory_unit_bytes(priced.host_bytes, priced.host_memory_bytes)
        return np.asarray(dual[-kinds:] / unit / self._scale)

    def _equal_rows(self, kind_of_row: IntArray) -> FloatArray:
        distinct, choices = kind_of_row.size, len(self._priced.problem.bitwidths)
        per_stage, cells = self._priced.prefill_s.shape[1], self._cells
        rows = np.zeros((distinct + per_stage, self._columns))
        own = cells + np.arange(distinct * choices).reshape(distinct, choices)
        rows[np.arange(distinct)[:, np.newaxis], own] = 1.0
        for cell in range(per_stage):
            kind, choice = divmod(cell, choices)
            rows[distinct + cell, cell:cells:per_stage] = -1.0
            rows[distinct + cell, own[kind_of_row == kind, choice]] = 1.0
        return rows


def distinct_rows(rows: FloatArray) -> tuple[FloatArray, IntArray]:
    """The distinct rows in lexicographic order, and how often each is there: as `np.unique` along
    an axis, which takes four times as long.
    """
    ordered = rows[np.lexsort(rows.T[::-1])]
    begins = np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1)).nonzero()[0]
    return ordered[begins], np.diff(begins, append=len(rows))


class LinearOutcome(NamedTuple):
    """The point, its value, and each row's worth; no point where infeasible or HiGHS fails."""

    infeasible: bool
    point: FloatArray | None
    value: float
    marginals: FloatArray


class LinearModel:
    """A linear programme in HiGHS, solved for several objectives, each from the last basis. Rows
    [R, C] lie between `row_least` and `row_most` [R], columns within `bounds` [2, C].
    """

    def __init__(
        self,
        rows: FloatArray,
        row_least: FloatArray,
        row_most: FloatArray,
        bounds: tuple[FloatArray, FloatArray],
    ) -> None:
        count, columns = rows.shape
        row, column = rows.nonzero()
        programme = highspy.HighsLp()
        programme.num_col_, programme.num_row_ = columns, count
        programme.col_cost_ = np.zeros(columns)
        programme.col_lower_, programme.col_upper_ = bounds
        programme.row_lower_, programme.row_upper_ = row_least, row_most
        programme.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        starts = np.concatenate([[0], np.bincount(row, minlength=count).cumsum()])
        programme.a_matrix_.start_ = starts.astype(np.int32)
        programme.a_matrix_.index_ = column.astype(np.int32)
        programme.a_matrix_.value_ = rows[row, column]
        self._highs = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in HIGHS_OPTIONS.items():
            self._highs.setOptionValue(name, value)
        self._highs.passModel(programme)
        self._columns: IntArray = np.arange(columns, dtype=np.int32)
        self._rows = count

    def limit_row(self, row: int, most: float) -> None:
        """Change the upper limit of a row without a lower one."""
        self._highs.changeRowBounds(row, -np.inf, most)

    def minimum(self, cost: FloatArray) -> LinearOutcome:
        """Find the least of `cost` [C] times the columns."""
        self._highs.changeColsCost(len(self._columns), self._columns, cost)
        self._highs.run()
        status = self._highs.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            infeasible = status == highspy.HighsModelStatus.kInfeasible
            return LinearOutcome(infeasible, None, 0.0, np.zeros(self._rows))
        found = self._highs.getSolution()
        point = np.array(found.col_value)
        return LinearOutcome(False, point, float(cost @ point), np.array(found.row_dual))
