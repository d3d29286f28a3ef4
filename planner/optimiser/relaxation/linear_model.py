"""One linear programme in HiGHS that is solved for several objectives, each from the last basis."""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from planner.optimiser.problem import FloatArray, IntArray

OPTIONS: dict[str, bool | int | str] = {"output_flag": False, "threads": 1, "solver": "simplex"}


@dataclass(frozen=True, eq=False)
class Outcome:
    """The solver's result: the point and its value, and what each row's limit is worth.

    `point` is None where there is none (`infeasible`), and where the solver fails.
    """

    infeasible: bool
    point: FloatArray | None
    value: float
    marginals: FloatArray


class LinearModel:
    """Rows [R, C] between `row_least` and `row_most` [R], and columns within `bounds` [2, C]."""

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
        for name, value in OPTIONS.items():
            self._highs.setOptionValue(name, value)
        self._highs.passModel(programme)
        self._columns: IntArray = np.arange(columns, dtype=np.int32)
        self._rows = count

    def limit_row(self, row: int, most: float) -> None:
        """Change the upper limit of a row without a lower one."""
        self._highs.changeRowBounds(row, -np.inf, most)

    def minimum(self, cost: FloatArray) -> Outcome:
        """Find the least of `cost` [C] times the columns."""
        self._highs.changeColsCost(len(self._columns), self._columns, cost)
        self._highs.run()
        status = self._highs.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            infeasible = status == highspy.HighsModelStatus.kInfeasible
            return Outcome(infeasible, None, 0.0, np.zeros(self._rows))
        found = self._highs.getSolution()
        point = np.array(found.col_value)
        return Outcome(False, point, float(cost @ point), np.array(found.row_dual))
