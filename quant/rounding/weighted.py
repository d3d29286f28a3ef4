"""Fitting scale and zero of each group to its weights, columns weighed by their inputs.

The error of an output of a linear is sum_j (w_j - q_j) x_j. Over many tokens its square weighs each
column by h_j = E[x_j^2], products of different columns left out. For one group this fit looks for

    min sum_j h_j (w_j - low - scale * q_j)^2    over scale, low and codes q_j in 0 .. 2^bits - 1

It alternates between the nearest codes and, for given codes, least squares (a solution of two
equations). As this ends in a local minimum, it starts from several ranges (`STARTS`), takes the one
whose first solution is best, and goes on from there. Scale and zero are rounded to what is stored
*before* each error is measured, and the best of all is kept; the first range is that of nearest
rounding as it is stored, so that no group is worse than there.

What a group can store is its `Grid`:

- `narrow`: scale and zero in a byte each, under a power of two of the row
  (`quant.narrow`), the zero being the value of code 2^(bits-1);
- `free`: both in bfloat16, where groups are whole rows;
- `integer`: the zero is a code, so that it stands for the weight 0 exactly (GPTQ's format);
- `middle`: that code is 2^(bits-1), as some kernels require.

Large matrices on a CPU go through `quant.rounding.weighted_loop`, all others through torch in steps
of rows; both work in positions relative to the group's range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quant.common.errors import SpecError
from quant.narrow import narrowed, nearest_narrow
from quant.numba_loops import has_numba, torch_threads
from quant.rounding.importance import InputStatistics
from quant.rounding.ways import affine_parameters, round_up_to_bfloat16
from quant.rounding.weighted_loop import FAR, LEAST_RANGE, SINGULAR, group_fit

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

FITTED_BITS = 6
"""The highest bitwidth that is fitted, which takes 0.3 of the squared error of SmolLM2's weights at
4 and 5 bit, 0.2 at 6; steps of 8 bit are too fine to gain anything."""

POLISHES = 4
"""Most repetitions for the best start; the fourth gains less than 1 %."""

EVENNESS = 0.02
"""Share of the mean importance that every column has on top: few tokens tell little about columns
that are small in all of them."""

_LEAST_LOOP_WEIGHTS = 1 << 18
"""Least weights for the compiled loop: small models need not wait seconds for the compiler."""


def column_importance(inputs: InputStatistics | None, columns: int) -> Tensor:
    """Importance of each column, float32 `[columns]` on the host with mean 1 or a little more; all
    alike without statistics. SpecError for another width or values that are not finite.
    """
    if inputs is None:
        return torch.ones(columns)
    return even_importance(inputs.mean_square, columns)


def even_importance(mean_square: Tensor, columns: int) -> Tensor:
    if tuple(mean_square.shape) != (columns,):
        raise SpecError(
            f"statistics of {list(mean_square.shape)} inputs for a weight of {columns} columns; "
            "measure them with this model"
        )
    mean = float(mean_square.double().mean())
    if not (mean >= 0 and mean < float("inf")):
        raise SpecError("the mean squares of a linear's inputs are not finite; measure them again")
    if mean == 0:
        return torch.ones(columns, device=mean_square.device)
    return (mean_square.double() / mean + EVENNESS).float()


def is_compiled(weight: Tensor, device: torch.device) -> bool:
    return device.type == "cpu" and weight.numel() >= _LEAST_LOOP_WEIGHTS and has_numba()


def fit(  # noqa: PLR0913  (what groups store, and how it is found)
    weight: Tensor,
    importance: Tensor,
    bits: int,
    group: int,
    grid: Grid,
    compiled: bool,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Codes, scales and zeros of `weight` `[rows, in]`, and how many groups are not finite.
    `importance` `[in]` is positive, `group` divides `in`. Codes are uint8, scale and zero float32
    `[rows, groups]` that bfloat16 holds; zeros of the grids `integer` and `middle` are codes.
    `factor` `[rows, 1]`: the rows' powers of two, for `narrow`.
    """
    assert (factor is not None) == (grid == "narrow"), "narrow scales are multiples of it"
    weight = weight.detach()
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        weight = weight.float()
    if compiled:
        return _fit_compiled(weight.contiguous(), importance, bits, group, grid, factor)
    values = weight.float().contiguous().unflatten(1, (-1, group))  # sums have the order of memory
    return _fit_groups(values, importance, bits, grid, factor)


def _starts(bits: int) -> Sequence[tuple[float, float]]:
    return STARTS if bits <= FITTED_BITS else STARTS[:1]


def _polishes(bits: int) -> int:
    return POLISHES if bits <= FITTED_BITS else 0


def _fit_compiled(
    weight: Tensor, importance: Tensor, bits: int, group: int, grid: Grid, factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, int]:
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    scale = torch.empty(rows, columns // group)
    zero = torch.empty_like(scale)
    bad = torch.empty(rows, dtype=torch.int32)
    factor = torch.ones(rows) if factor is None else factor.flatten()
    held = weight if weight.dtype == torch.float32 else weight.view(torch.uint16)
    loop = group_fit(weight.dtype, torch.get_num_threads() > 1)
    with torch_threads():
        loop(
            held.numpy(),
            importance.numpy(),
            torch.tensor(_starts(bits)).numpy(),
            (bits, GRIDS.index(grid), _polishes(bits)),
            factor.numpy(),
            codes.numpy(),
            scale.numpy(),
            zero.numpy(),
            bad.numpy(),
        )
    return codes, scale, zero, int(bad.sum())


def _fit_groups(
    values: Tensor, importance: Tensor, bits: int, grid: Grid, factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, int]:
    place = _Placed.of(values, bits, grid, factor)
    weights = importance.to(values.device).view(1, *values.shape[1:])
    moments = _Moments.of(place.relative, weights)
    top = (1 << bits) - 1
    scale, zero = _nearest_parameters(place, bits)
    step, low = place.stored(scale, zero)
    sums = _Sums.of(place.relative, weights, step, low, top)
    least = sums.error(moments, step, low)
    guess = _solve(moments, sums, bits, grid)
    for share_low, share_high in _starts(bits)[1:]:
        mean = moments.mean()
        start = mean + share_low * (place.low - mean)
        end = mean + share_high * (place.high - mean)
        sums = _Sums.of(place.relative, weights, (end - start) / top, start, top)
        guess = guess.or_better(_solve(moments, sums, bits, grid))
    last = torch.full_like(least, torch.inf)
    alive = place.fits & torch.isfinite(guess.error)
    for _ in range(_polishes(bits)):
        next_scale, next_zero = place.rounded(guess.step, guess.low)
        step, low = place.stored(next_scale, next_zero)
        alive &= next_scale > 0
        sums = _Sums.of(place.relative, weights, step, low, top)
        error = sums.error(moments, step, low)
        alive &= error < last
        last = error
        better = alive & (error < least)
        least = torch.where(better, error, least)
        scale = torch.where(better, next_scale, scale)
        zero = torch.where(better, next_zero, zero)
        guess = _solve(moments, sums, bits, grid)
        alive &= torch.isfinite(guess.error)
    step, low = place.stored(scale, zero)
    codes = _nearest_codes(place.relative, step, low, top)
    bad = scale.numel() - int(torch.isfinite(place.range).sum())
    return codes.to(torch.uint8).flatten(1), scale, zero, bad


@dataclass(frozen=True)
class _Placed:
    """Groups relative to their ranges: `relative` = (weight - middle) / range `[rows, groups,
    group]`, else `[rows, groups]`. `inverse` of the range is 1 where the group is left to nearest
    rounding (`fits` false).
    """

    relative: Tensor
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
    def of(cls, values: Tensor, bits: int, grid: Grid, factor: Tensor | None) -> _Placed:
        low, high = values.amin(-1), values.amax(-1)
        if grid != "free":
            low, high = low.clamp_(max=0), high.clamp_(min=0)
        spread = high - low
        middle = low + 0.5 * spread if grid == "free" else torch.zeros_like(low)
        fits = (spread > LEAST_RANGE) & (middle.abs() <= FAR * spread)
        inverse = torch.where(fits, spread, 1.0).reciprocal()
        relative = (values - middle.unsqueeze(-1)).mul_(inverse.unsqueeze(-1))
        low, high = (low - middle) * inverse, (high - middle) * inverse
        return cls(relative, low, high, middle, spread, inverse, fits, bits, grid, factor)

    @property
    def half(self) -> int:
        return 1 << (self.bits - 1)

    def rounded(self, step: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        if self.factor is not None:
            return narrowed(step / self.inverse, low / self.inverse, self.bits, self.factor)
        scale = (step / self.inverse).bfloat16().float()
        if self.grid != "free":
            return scale, (low / step).neg().round()
        zero = low / self.inverse + self.middle + self.half * scale
        return scale, zero.bfloat16().float()

    def stored(self, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        step = scale * self.inverse
        if self.grid in ("integer", "middle"):
            return step, -step * zero
        return step, (zero - self.middle - self.half * scale) * self.inverse


def _nearest_parameters(place: _Placed, bits: int) -> tuple[Tensor, Tensor]:
    top = (1 << bits) - 1
    low = place.low / place.inverse + place.middle
    high = place.high / place.inverse + place.middle
    if place.factor is not None:
        return nearest_narrow(low, high, bits, place.factor)
    if place.grid == "free":
        return affine_parameters(low, high, bits)
    if place.grid == "middle":
        high = torch.maximum(low.neg(), high)
        low = high.neg()
    scale = round_up_to_bfloat16((high - low) / top)
    scale.masked_fill_(scale == 0, 1.0)
    if place.grid == "middle":
        return scale, torch.full_like(scale, place.half)
    return scale, (low.neg() / scale).round_().clamp_(0, top)


def _nearest_codes(relative: Tensor, step: Tensor, low: Tensor, top: int) -> Tensor:
    inverse = step.reciprocal()
    position = relative * inverse.unsqueeze(-1)
    position.add_((0.5 - low * inverse).unsqueeze(-1))
    return position.nan_to_num_(0.0).clamp_(0, top + 0.5).floor_()


@dataclass(frozen=True)
class _Moments:
    """Sums over a group of h, h w and h w^2, float64 `[rows, groups]`, w in relative terms."""

    count: Tensor
    weight: Tensor
    square: Tensor

    @classmethod
    def of(cls, relative: Tensor, importance: Tensor) -> _Moments:
        weighted = relative * importance
        count = importance.sum(-1).expand(relative.shape[:2])
        square = (weighted * relative).sum(-1)
        return cls(count.double(), weighted.sum(-1).double(), square.double())

    def mean(self) -> Tensor:
        return (self.weight / self.count).float()


@dataclass(frozen=True)
class _Sums:
    """Sums over a group of h q, h q^2 and h q w for codes q, float64 `[rows, groups]`."""

    code: Tensor
    square: Tensor
    product: Tensor

    @classmethod
    def of(cls, relative: Tensor, importance: Tensor, step: Tensor, low: Tensor, top: int) -> _Sums:
        codes = _nearest_codes(relative, step, low, top)
        weighted = codes * importance
        square = codes.mul_(weighted).sum(-1)
        product = torch.mul(weighted, relative, out=codes).sum(-1)
        return cls(weighted.sum(-1).double(), square.double(), product.double())

    def error(self, moments: _Moments, step: Tensor, low: Tensor) -> Tensor:
        step, low = step.double(), low.double()
        crossed = step * self.square - 2 * self.product + 2 * low * self.code
        return moments.square + step * crossed + low * (low * moments.count - 2 * moments.weight)


@dataclass(frozen=True)
class _Solution:
    """What fits codes best, float32 `[rows, groups]`; the error is infinite where nothing does."""

    step: Tensor
    low: Tensor
    error: Tensor

    def or_better(self, other: _Solution) -> _Solution:
        takes = other.error < self.error
        step = torch.where(takes, other.step, self.step)
        low = torch.where(takes, other.low, self.low)
        return _Solution(step, low, torch.where(takes, other.error, self.error))


def _solve(moments: _Moments, sums: _Sums, bits: int, grid: Grid) -> _Solution:
    if grid == "middle":
        return _fixed_zero(moments, sums, torch.full_like(sums.code, 1 << (bits - 1)))
    determinant = moments.count * sums.square - sums.code**2
    slope = moments.count * sums.product - sums.code * moments.weight
    possible = (determinant > SINGULAR * moments.count * sums.square) & (slope > 0)
    step = slope / torch.where(possible, determinant, 1.0)
    low = (moments.weight - step * sums.code) / moments.count
    if grid == "integer":
        code = (low / torch.where(possible, step, -1.0)).neg().floor()
        top = (1 << bits) - 1
        below = _fixed_zero(moments, sums, code.clamp(0, top), possible)
        return below.or_better(_fixed_zero(moments, sums, (code + 1).clamp(0, top), possible))
    error = moments.square - (moments.weight**2 + slope * step) / moments.count
    error = torch.where(possible, error, torch.inf)
    return _Solution(step.float(), low.float(), error)


def _fixed_zero(
    moments: _Moments, sums: _Sums, zero: Tensor, possible: Tensor | None = None
) -> _Solution:
    product = sums.product - zero * moments.weight
    square = sums.square - 2 * zero * sums.code + zero**2 * moments.count
    fits = (square > 0) & (product > 0)
    if possible is not None:
        fits &= possible
    step = product / torch.where(fits, square, 1.0)
    error = torch.where(fits, moments.square - product * step, torch.inf)
    return _Solution(step.float(), (-zero * step).float(), error)
