"""Fit of scale and zero of groups, one algorithm for tensors `[rows, groups]` and for vectors of
a compiled loop, which take the part of tensors (`quant.numba_lanes`).

For columns of importance h_j it looks for

    min sum_j h_j (w_j - low - scale * q_j)^2    over scale, low and codes q_j in 0 .. 2^bits - 1

It alternates between the nearest codes and, for given codes, least squares (a solution of two
equations). As this ends in a local minimum, it starts from several ranges (`STARTS`), takes the one
whose first solution is best, and goes on from there. Scale and zero are rounded to what is stored
*before* each error is measured, and the best of all is kept; the first range is that of nearest
rounding as it is stored, so that no group is worse than there. All is relative to the group's
range: (weight - middle) / range.

What a group can store is its `Grid`:

- `narrow`: scale and zero in a byte each, under a power of two of the row
  (`quant.narrow`), the zero being the value of code 2^(bits-1);
- `free`: both in bfloat16, where groups are whole rows;
- `integer`: the zero is a code, so that it stands for the weight 0 exactly (GPTQ's format);
- `middle`: that code is 2^(bits-1), as some kernels require.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from quant.narrow import narrowed, nearest_narrow
from quant.rounding.ways import affine_parameters, round_up_to_bfloat16

Grid = Literal["free", "integer", "middle", "narrow"]
GRIDS: tuple[Grid, ...] = ("free", "integer", "middle", "narrow")

STARTS = (
    *((1.0, 1.0), (0.95, 0.95), (0.85, 0.85), (0.65, 0.65), (1.1, 1.1), (1.0, 0.95)),
    *((0.95, 1.0), (1.0, 0.9), (0.9, 1.0), (1.0, 0.75), (0.8, 1.0), (0.95, 0.8)),
    *((0.75, 0.85), (0.8, 0.6), (0.6, 0.8), (1.05, 0.9), (1.1, 1.0), (1.0, 1.1)),
)
"""Shares of the distances from the weighted mean to the least and to the largest weight, the ranges
that the fit starts from: those that one after the other took most of the error of SmolLM2's groups
of 32, and three narrower ones for wider groups. With 441 pairs of 0.3 to 1.1 the error of groups of
32 to 192 is up to 3 % less, for seven times the work. Ranges beyond the weights count at 4 bit: ten
pairs of 0.4 to 1 have 16 % more there, and 6 % more at 3 bit."""

SHARES = (0.98, 0.95, 0.92, 0.88, 0.84, 0.8, 0.74, 0.67, 0.6, 0.5)
"""Shares of the largest magnitude that the fit starts from where the middle code is zero. They take
a sixth of the weighted error of SmolLM2's rows at 8 bit, `STARTS` would take a twelfth."""

FITTED_BITS = 6
"""The highest bitwidth at which groups are fitted, which takes 0.3 of the squared error of
SmolLM2's weights at 4 and 5 bit, 0.2 at 6. Of 8 bit whole rows with a scale alone are."""

POLISHES = 4
"""Most repetitions for the best start; the fourth gains less than 1 %."""

_LEAST_RANGE = 1e-30
"""The least range of a group that is fitted; squares of narrower ones are beyond float32."""

_FAR = 64.0
"""Ranges from zero at which a group is left as it is: bfloat16 cannot place it any better."""

_SINGULAR = 1e-6
"""Spread of codes, relative to their squares, below which float32 sums do not tell it from zero."""


@dataclass(frozen=True)
class Moments:
    """Sums over a group of h, h w and h w^2, in float64."""

    count: Tensor
    weight: Tensor
    square: Tensor


@dataclass(frozen=True)
class CodeSums:
    """Sums over a group of h q, h q^2 and h q w for codes q, in float64."""

    code: Tensor
    square: Tensor
    product: Tensor


class Groups(Protocol):
    """Weights that share scale and zero, and passes over them."""

    def extremes(self) -> tuple[Tensor, Tensor]:
        """The least and the largest weight; NaN in either of a group that is not finite."""

    def place(self, middle: Tensor, inverse: Tensor) -> Moments:
        """From here on, weights are (w - middle) inverse."""

    def sums(self, step: Tensor, low: Tensor, top: int) -> CodeSums:
        """Those of the nearest codes."""

    def sums_and_error(self, step: Tensor, low: Tensor, top: int) -> tuple[CodeSums, Tensor]:
        """With the sum of h (w - low - step q)^2, in float32: what the other sums make of it would
        be off by a thousandth at 6 bit.
        """


@dataclass(frozen=True)
class Fitted:
    """Scale and zero as they are stored, and where codes lie relative to the group's range."""

    scale: Tensor
    zero: Tensor
    step: Tensor
    low: Tensor
    place: Place


def fit_groups(groups: Groups, bits: int, grid: Grid, factor: Tensor | None) -> Fitted:
    place = Place.of(groups, bits, grid, factor)
    moments = groups.place(place.middle, place.inverse)
    top = (1 << bits) - 1
    scale, zero = place.nearest()
    step, low = place.stored(scale, zero)
    if bits > FITTED_BITS and grid != "middle":
        return Fitted(scale, zero, step, low, place)
    sums, least = groups.sums_and_error(step, low, top)
    guess = _solve(moments, sums, bits, grid)
    for start_step, start_low in place.starts((moments.weight / moments.count).float()):
        sums = groups.sums(start_step, start_low, top)
        guess = guess.or_better(_solve(moments, sums, bits, grid))
    last, alive = None, place.fits & guess.error.isfinite()
    for _ in range(POLISHES):
        next_scale, next_zero = place.rounded(guess.step, guess.low)
        next_step, next_low = place.stored(next_scale, next_zero)
        alive = alive & (next_scale > 0)
        sums, error = groups.sums_and_error(next_step, next_low, top)
        alive = alive if last is None else alive & (error < last)
        last = error
        better = alive & (error < least)
        least = error.where(better, least)
        scale, zero = next_scale.where(better, scale), next_zero.where(better, zero)
        guess = _solve(moments, sums, bits, grid)
        alive = alive & guess.error.isfinite()
    return Fitted(scale, zero, *place.stored(scale, zero), place)


@dataclass(frozen=True)
class Place:
    """Where groups lie: `low` and `high` relative to their range. `inverse` of the range is 1 where
    the group is left to nearest rounding (`fits` false).
    """

    low: Tensor
    high: Tensor
    middle: Tensor
    range: Tensor
    inverse: Tensor
    fits: Tensor
    bits: int
    grid: Grid
    factor: Tensor | None

    @classmethod
    def of(cls, groups: Groups, bits: int, grid: Grid, factor: Tensor | None) -> Place:
        low, high = groups.extremes()
        if grid != "free":
            low, high = low.clamp(max=0), high.clamp(min=0)
        spread = high - low
        middle = low + 0.5 * spread if grid == "free" else 0.0 * low
        fits = (spread > _LEAST_RANGE) & (middle.abs() <= _FAR * spread)
        inverse = 1 / spread.where(fits, 1.0)
        low, high = (low - middle) * inverse, (high - middle) * inverse
        return cls(low, high, middle, spread, inverse, fits, bits, grid, factor)

    @property
    def _half(self) -> int:
        return 1 << (self.bits - 1)

    def nearest(self) -> tuple[Tensor, Tensor]:
        """Scale and zero as nearest rounding stores them."""
        top = (1 << self.bits) - 1
        low, high = self.low / self.inverse + self.middle, self.high / self.inverse + self.middle
        if self.factor is not None:
            return nearest_narrow(low, high, self.bits, self.factor)
        if self.grid == "free":
            return affine_parameters(low, high, self.bits)
        if self.grid == "middle":
            high = (-low).maximum(high)
            low = -high
        scale = round_up_to_bfloat16((high - low) / top)
        scale = scale.where(scale > 0, 1.0)
        if self.grid == "middle":
            return scale, 0.0 * scale + self._half
        return scale, (-low / scale).round().clamp(0, top)

    def starts(self, mean: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Steps and values of code 0 that the fit starts from."""
        top = (1 << self.bits) - 1
        if self.grid == "middle":
            widest = (-self.low).maximum(self.high) / (0.5 * top)
            for share in SHARES:
                yield share * widest, -self._half * share * widest
            return
        for share_low, share_high in STARTS[1:]:
            start = mean + share_low * (self.low - mean)
            end = mean + share_high * (self.high - mean)
            yield (end - start) / top, start

    def rounded(self, step: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero that are stored, next to these."""
        if self.factor is not None:
            return narrowed(step / self.inverse, low / self.inverse, self.bits, self.factor)
        scale = (step / self.inverse).bfloat16().float()
        if self.grid != "free":
            return scale, (-low / step).round()
        zero = low / self.inverse + self.middle + self._half * scale
        return scale, zero.bfloat16().float()

    def stored(self, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        """Step and value of code 0 that these stand for."""
        step = scale * self.inverse
        if self.grid in ("integer", "middle"):
            return step, -step * zero
        return step, (zero - self.middle - self._half * scale) * self.inverse


@dataclass(frozen=True)
class _Solution:
    """What fits codes best, in float32; the error is infinite where nothing does."""

    step: Tensor
    low: Tensor
    error: Tensor

    def or_better(self, other: _Solution) -> _Solution:
        takes = other.error < self.error
        step, low = other.step.where(takes, self.step), other.low.where(takes, self.low)
        return _Solution(step, low, other.error.where(takes, self.error))


def _solve(moments: Moments, sums: CodeSums, bits: int, grid: Grid) -> _Solution:
    top = (1 << bits) - 1
    if grid == "middle":
        return _fixed_zero(moments, sums, 1 << (bits - 1))
    determinant = moments.count * sums.square - sums.code * sums.code
    slope = moments.count * sums.product - sums.code * moments.weight
    possible = (determinant > _SINGULAR * moments.count * sums.square) & (slope > 0)
    step = slope / determinant.where(possible, 1.0)
    low = (moments.weight - step * sums.code) / moments.count
    if grid == "integer":
        code = (-low / step).floor()
        below = _fixed_zero(moments, sums, code.clamp(0, top), possible)
        return below.or_better(_fixed_zero(moments, sums, (code + 1).clamp(0, top), possible))
    error = moments.square - (moments.weight * moments.weight + slope * step) / moments.count
    return _Solution(step.float(), low.float(), error.where(possible, float("inf")))


def _fixed_zero(
    moments: Moments, sums: CodeSums, zero: Tensor | int, possible: Tensor | None = None
) -> _Solution:
    product = sums.product - zero * moments.weight
    square = sums.square - 2 * zero * sums.code + zero * zero * moments.count
    fits = (square > 0) & (product > 0)
    fits = fits if possible is None else fits & possible
    step = product / square.where(fits, 1.0)
    error = moments.square - product * step
    return _Solution(step.float(), (-zero * step).float(), error.where(fits, float("inf")))
