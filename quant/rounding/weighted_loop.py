"""The fit of `quant.rounding.weighted`, group after group in a core's cache, compiled by numba; all
is relative to the group's range: (weight - middle) / range.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from quant.narrow import MIDDLE_ZERO, MOST, RANGE_SLACK, ZERO_STEPS
from quant.numba_loops import compiled_loop, widening

LEAST_RANGE = 1e-30
"""The least range of a group that is fitted; squares of narrower ones are beyond float32."""

FAR = 64.0
"""Ranges from zero at which a group is left as it is: bfloat16 cannot place it any better."""

SINGULAR = 1e-6
"""Spread of codes, relative to their squares, below which float32 sums do not tell it from zero."""

FREE, INTEGER, MIDDLE, NARROW = range(4)
"""What groups can store as zero: places in `quant.rounding.weighted.GRIDS`."""

_NONE, _ONE, _HALF_ONE = np.float32(0), np.float32(1), np.float32(0.5)


@cache
def group_fit(dtype: torch.dtype, parallel: bool) -> Any:
    """Compile `fit_rows(weight, importance, starts, (bits, grid, polishes), factors, codes, scale,
    zero, bad)`: it fills uint8 `[rows, in]`, float32 `[rows, groups]`, and int32 `[rows]` with the
    groups that are not finite. `weight` is float32 or the bits of 16-bit floats.
    """
    import numba

    widen, fit_group = widening(dtype), _one_group()
    encode = compiled_loop(_encode, False)

    def fit_rows(  # noqa: PLR0913  (compiled loops take arrays)
        weight: Any,
        importance: Any,
        starts: Any,
        settings: Any,
        factors: Any,
        codes: Any,
        scales: Any,
        zeros: Any,
        bad: Any,
    ) -> None:
        size = weight.shape[1] // scales.shape[1]
        for row in numba.prange(weight.shape[0]):
            relative = np.empty(size, np.float32)
            bad[row] = 0
            for group in range(scales.shape[1]):
                own = slice(group * size, (group + 1) * size)
                stored = weight[row, own]
                low = high = np.float32(widen(stored[0]))
                check = _NONE
                for i in range(size):
                    number = np.float32(widen(stored[i]))
                    relative[i] = number
                    low = number if number < low else low
                    high = number if number > high else high
                    check += number * _NONE  # NaN for what is not finite
                if check != _NONE or not high - low < np.float32(np.inf):
                    bad[row] += 1
                    continue
                scale, zero, step, begin = fit_group(
                    relative, importance[own], low, high, starts, (*settings, factors[row])
                )
                scales[row, group], zeros[row, group] = scale, zero
                encode(relative, step, begin, np.float32((1 << settings[0]) - 1), codes[row, own])

    return compiled_loop(fit_rows, parallel)


def _encode(relative: Any, step: Any, low: Any, top: Any, codes: Any) -> None:
    inverse, most = _ONE / step, top + _HALF_ONE
    shift = _HALF_ONE - low * inverse
    for i in range(len(relative)):
        position = relative[i] * inverse + shift
        position = position if position > _NONE else _NONE
        codes[i] = np.uint8(np.int32(position if position < most else most))


def _measure(relative: Any, importance: Any, step: Any, low: Any, top: Any) -> Any:
    inverse, most = _ONE / step, top + _HALF_ONE
    shift = _HALF_ONE - low * inverse
    code_sum, square_sum, product_sum = _NONE, _NONE, _NONE
    for i in range(len(relative)):
        position = relative[i] * inverse + shift
        position = position if position > _NONE else _NONE
        code = np.float32(np.int32(position if position < most else most))
        weighted = importance[i] * code
        code_sum += weighted
        square_sum += weighted * code
        product_sum += weighted * relative[i]
    return np.float64(code_sum), np.float64(square_sum), np.float64(product_sum)


def _error(moments: Any, sums: Any, step: Any, low: Any) -> Any:
    count, weight, square = moments
    step, low = np.float64(step), np.float64(low)
    crossed = step * sums[1] - 2 * sums[2] + 2 * low * sums[0]
    return square + step * crossed + low * (low * count - 2 * weight)


def _fixed_zero(moments: Any, sums: Any, zero: Any) -> Any:
    product = sums[2] - zero * moments[1]
    square = sums[1] - 2 * zero * sums[0] + zero * zero * moments[0]
    if not (square > 0 and product > 0):
        return np.float32(1), np.float32(0), np.inf
    step = product / square
    return np.float32(step), np.float32(-zero * step), moments[2] - product * step


@cache
def _solver() -> Any:
    fixed_zero = compiled_loop(_fixed_zero, False)

    def solve(moments: Any, sums: Any, half: Any, grid: Any) -> Any:
        count, weight, square = moments
        if grid == MIDDLE:
            return fixed_zero(moments, sums, np.float64(half))
        determinant = count * sums[1] - sums[0] * sums[0]
        slope = count * sums[2] - sums[0] * weight
        if not (determinant > SINGULAR * count * sums[1] and slope > 0):
            return np.float32(1), np.float32(0), np.inf
        step = slope / determinant
        low = (weight - step * sums[0]) / count
        if grid in (FREE, NARROW):
            error = square - (weight * weight + slope * step) / count
            return np.float32(step), np.float32(low), error
        top = 2 * np.float64(half) - 1
        code = np.floor(-low / step)
        below = fixed_zero(moments, sums, min(max(code, 0.0), top))
        above = fixed_zero(moments, sums, min(max(code + 1, 0.0), top))
        return above if above[2] < below[2] else below

    return compiled_loop(solve, False)


@cache
def _nearest_parameters() -> Any:
    nearest, upwards = _to_bfloat16(up=False), _to_bfloat16(up=True)
    narrow_zero, zero_steps = _narrow_zero(), compiled_loop(_zero_steps, False)

    def parameters(low: Any, high: Any, half: Any, grid: Any, factor: Any) -> Any:
        top = half + half - _ONE
        if grid == NARROW:
            reach = top - np.float32(RANGE_SLACK) / zero_steps(half)
            scale = np.ceil((high - low) / reach / factor)
            scale = min(max(scale, _ONE), np.float32(MOST)) * factor
            middle = (low + high + scale) * _HALF_ONE if high > low else _NONE
            return scale, narrow_zero(middle, scale, zero_steps(half))
        if grid == FREE:
            zero = nearest(low + half * ((high - low) / top))
            scale = upwards(max((high - zero) / (half - _ONE), (zero - low) / half))
            return (scale if scale > _NONE else _ONE), zero
        if grid == MIDDLE:
            high = max(-low, high)
            low = -high
        scale = upwards((high - low) / top)
        scale = scale if scale > _NONE else _ONE
        zero = half if grid == MIDDLE else min(max(np.rint(-low / scale), _NONE), top)
        return scale, np.float32(zero)

    return compiled_loop(parameters, False)


@cache
def _one_group() -> Any:
    """Compile the fit of a group, whose weights are replaced; it gives stored scale and zero, step
    and low.
    """
    solve, nearest_parameters = _solver(), _nearest_parameters()
    measure, error_of = compiled_loop(_measure, False), compiled_loop(_error, False)
    to_bfloat16, narrow_zero = _to_bfloat16(up=False), _narrow_zero()
    zero_steps = compiled_loop(_zero_steps, False)

    def placed(scale: Any, zero: Any, middle: Any, inverse: Any, half: Any, grid: Any) -> Any:
        step = scale * inverse
        if grid in (FREE, NARROW):
            return step, (zero - middle - half * scale) * inverse
        return step, -step * zero

    def rounded(guess: Any, middle: Any, inverse: Any, half: Any, grid: Any, factor: Any) -> Any:
        if grid == NARROW:
            scale = np.float32(np.rint(guess[0] / inverse / factor))
            scale = min(max(scale, _ONE), np.float32(MOST)) * factor
            return scale, narrow_zero(guess[1] / inverse + half * scale, scale, zero_steps(half))
        scale = to_bfloat16(guess[0] / inverse)
        if grid == FREE:
            return scale, to_bfloat16(guess[1] / inverse + middle + half * scale)
        return scale, np.float32(np.rint(-guess[1] / guess[0]))

    placed, rounded = compiled_loop(placed, False), compiled_loop(rounded, False)

    def fit_group(
        relative: Any, importance: Any, low: Any, high: Any, starts: Any, settings: Any
    ) -> Any:
        bits, grid, polishes, factor = settings
        half = np.float32(1 << (bits - 1))
        top = half + half - _ONE
        if grid != FREE:
            low, high = min(low, _NONE), max(high, _NONE)
        spread = high - low
        middle = low + _HALF_ONE * spread if grid == FREE else _NONE
        fits = spread > np.float32(LEAST_RANGE) and abs(middle) <= np.float32(FAR) * spread
        inverse = _ONE / spread if fits else _ONE
        count, weight, square = _NONE, _NONE, _NONE
        for i in range(len(relative)):
            number = (relative[i] - middle) * inverse
            relative[i] = number
            weighted = importance[i] * number
            count += importance[i]
            weight += weighted
            square += weighted * number
        scale, zero = nearest_parameters(low, high, half, grid, factor)
        step, begin = placed(scale, zero, middle, inverse, half, grid)
        if not fits:
            return scale, zero, step, begin
        moments = np.float64(count), np.float64(weight), np.float64(square)
        sums = measure(relative, importance, step, begin, top)
        least = error_of(moments, sums, step, begin)
        guess = solve(moments, sums, half, grid)
        mean = weight / count
        start, end = (low - middle) * inverse - mean, (high - middle) * inverse - mean
        for k in range(1, len(starts)):
            first = mean + starts[k, 0] * start
            sums = measure(
                relative, importance, (mean + starts[k, 1] * end - first) / top, first, top
            )
            other = solve(moments, sums, half, grid)
            if other[2] < guess[2]:
                guess = other
        last = np.inf
        for _ in range(polishes):
            new_scale, new_zero = rounded(guess, middle, inverse, half, grid, factor)
            if not (guess[2] < np.inf and new_scale > _NONE):
                break
            new_step, new_begin = placed(new_scale, new_zero, middle, inverse, half, grid)
            sums = measure(relative, importance, new_step, new_begin, top)
            error = error_of(moments, sums, new_step, new_begin)
            if not error < last:
                break
            last = error
            if error < least:
                least, scale, zero, step, begin = error, new_scale, new_zero, new_step, new_begin
            guess = solve(moments, sums, half, grid)
        return scale, zero, step, begin

    return compiled_loop(fit_group, False)


def _zero_steps(half: Any) -> Any:
    return min(np.float32(ZERO_STEPS), np.float32(MIDDLE_ZERO) / half)


@cache
def _narrow_zero() -> Any:
    cut_off = _to_bfloat16(up=None)

    def zero(value: Any, scale: Any, steps: Any) -> Any:
        place = np.rint(value / scale * steps)
        place = min(max(place, np.float32(-MIDDLE_ZERO)), np.float32(MOST - MIDDLE_ZERO))
        return cut_off(np.float32(place / steps) * scale)

    return compiled_loop(zero, False)


@cache
def _to_bfloat16(up: bool | None) -> Any:
    """Compile rounding to the nearest bfloat16, with `up` to the least not below, and where that is
    None towards 0.
    """
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    word = ir.IntType(32)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], word)
        half = ir.Constant(word, 0xFFFF if up else 0)
        if up is False:
            odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
            half = builder.add(odd, ir.Constant(word, 0x7FFF))
        cut = builder.and_(builder.add(bits, half), ir.Constant(word, 0xFFFF0000))
        return builder.bitcast(cut, ir.FloatType())

    return intrinsic(lambda context, number: (types.float32(types.float32), code))
