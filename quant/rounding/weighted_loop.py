"""The fit of `quant.rounding.group_fit`, compiled by numba: `LANES` rows at once, group after group
in a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from quant.numba_lanes import LANES, Columns, Vector, traced
from quant.numba_loops import compiled_loop, widening
from quant.rounding.group_fit import CodeSums, Grid, Moments, fit_groups

_NONE, _HALF_ONE = np.float32(0), np.float32(0.5)

_SCALE, _ZERO, _MIDDLE, _INVERSE, _STEP, _LOW, _RANGE = range(7)
"""Rows of what is found of groups."""


@cache
def group_fit(dtype: torch.dtype, bits: int, grid: Grid, parallel: bool) -> Any:
    """Compile `fit_rows(weight, importance, factors, codes, scale, zero, bad)`: it fills uint8
    `[rows, in]`, float32 `[rows, groups]`, and int32 `[rows]` with the groups that are not finite.
    `weight` is float32 or the bits of 16-bit floats.
    """
    import numba

    widen, encode, fit_lanes = widening(dtype), _encoding(dtype, bits), _lanes_fit(bits, grid)

    def fit_rows(  # noqa: PLR0913  (compiled loops take arrays)
        weight: Any, importance: Any, factors: Any, codes: Any, scales: Any, zeros: Any, bad: Any
    ) -> None:
        rows, size = len(weight), weight.shape[1] // scales.shape[1]
        for block in numba.prange((rows + LANES - 1) // LANES):
            numbers, found = np.empty((size, LANES), np.float32), np.empty((7, LANES), np.float32)
            first, factor = block * LANES, np.empty((1, LANES), np.float32)
            count = min(LANES, rows - first)
            bad[first : first + count] = 0
            for lane in range(LANES):  # those beyond the last row do its work again
                factor[0, lane] = factors[min(first + lane, rows - 1)]
            for group in range(scales.shape[1]):
                own = slice(group * size, (group + 1) * size)
                for lane in range(LANES):
                    stored = weight[min(first + lane, rows - 1), own]
                    for i in range(size):
                        numbers[i, lane] = widen(stored[i])
                fit_lanes(numbers, importance[own], factor, found)
                for lane in range(count):
                    row = first + lane
                    if not found[_RANGE, lane] < np.inf:
                        bad[row] += 1
                        continue
                    scales[row, group], zeros[row, group] = found[_SCALE, lane], found[_ZERO, lane]
                    encode(weight[row, own], found[:, lane], codes[row, own])

    return compiled_loop(fit_rows, parallel)


@cache
def _lanes_fit(bits: int, grid: Grid) -> Any:
    def fit(columns: Columns, given: Sequence[Vector]) -> Sequence[Any]:
        factor: Any = given[0] if grid == "narrow" else None
        groups: Any = _LaneGroups(columns)
        found = fit_groups(groups, bits, grid, factor)
        place = (found.place.middle, found.place.inverse)
        return found.scale, found.zero, *place, found.step, found.low, found.place.range

    return traced(fit, 1)


class _LaneGroups:
    """A group in each lane."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._middle: Any = None
        self._inverse: Any = None

    def extremes(self) -> tuple[Vector, Vector]:
        def step(number: Vector, _: Vector, so_far: Sequence[Vector]) -> Sequence[Vector]:
            low, high, damage = so_far
            return number.where(number < low, low), high.maximum(number), damage + number * 0.0

        first = (float("inf"), float("-inf"), 0.0)
        low, high, damage = self._columns.sums(step, first)
        return low + damage, high + damage

    def place(self, middle: Vector, inverse: Vector) -> Moments:
        def terms(number: Vector, weight: Vector) -> Sequence[Vector]:
            return weight, weight * number, weight * number * number

        self._columns.replace(lambda number: (number - middle) * inverse)
        moments: Any = [each.double() for each in self._totals(terms, 3)]
        return Moments(*moments)

    def sums(self, step: Vector, low: Vector, top: int) -> CodeSums:
        code_of = _nearest_code(step, low, top)
        found: Any = self._totals(lambda w, h: _terms(w, h, code_of(w)), 3)
        return CodeSums(*(each.double() for each in found))

    def sums_and_error(self, step: Vector, low: Vector, top: int) -> tuple[CodeSums, Vector]:
        code_of = _nearest_code(step, low, top)

        def terms(number: Vector, weight: Vector) -> Sequence[Vector]:
            code = code_of(number)
            off = number - (code * step + low)
            return *_terms(number, weight, code), weight * off * off

        *found, error = self._totals(terms, 4)
        sums: Any = [each.double() for each in found]
        return CodeSums(*sums), error

    def _totals(self, terms: Callable[[Vector, Vector], Sequence[Vector]], count: int) -> Any:
        def add(number: Vector, weight: Vector, so_far: Sequence[Vector]) -> Sequence[Vector]:
            more = terms(number, weight)
            return [old + new for old, new in zip(so_far, more, strict=True)]

        return self._columns.sums(add, (0.0,) * count)


def _nearest_code(step: Vector, low: Vector, top: int) -> Callable[[Vector], Vector]:
    inverse = 1 / step
    shift = 0.5 - low * inverse

    def code(number: Vector) -> Vector:
        position = number * inverse + shift
        return position.where(position > 0, 0.0).clamp(max=top + 0.5).floor()

    return code


def _terms(number: Vector, weight: Vector, code: Vector) -> Sequence[Vector]:
    weighted = weight * code
    return weighted, weighted * code, weighted * number


@cache
def _encoding(dtype: torch.dtype, bits: int) -> Any:
    widen, most = widening(dtype), np.float32((1 << bits) - 0.5)

    def encode(stored: Any, found: Any, codes: Any) -> None:
        middle, scaling, inverse = found[_MIDDLE], found[_INVERSE], np.float32(1) / found[_STEP]
        shift = _HALF_ONE - found[_LOW] * inverse
        for i in range(len(stored)):
            position = (np.float32(widen(stored[i])) - middle) * scaling * inverse + shift
            position = position if position > _NONE else _NONE
            codes[i] = np.uint8(np.int32(position if position < most else most))

    return compiled_loop(encode, False)
