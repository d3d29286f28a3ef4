"""GPTQ: rounding a weight column by column so that its outputs on calibration inputs change least.

Frantar et al., "GPTQ" (ICLR 2023), Algorithm 1. For inputs X `[tokens, in]` the error of a row w is
(w - q) X^T X (w - q)^T. Columns are rounded in turn, and what a column is off by is made up for in
those that follow: by its error over the diagonal of the upper Cholesky factor of the inverse of
X^T X, times the rest of the factor's row. Columns wait in blocks for the errors of earlier blocks.

The range of a group is narrowed by the factor that leaves the least error weighted by the squared
inputs, which gains more than anything else here (`docs/quantization.md`). Scales are rounded up to
values that float16, the format's type (`quant.gptq.format`), and bfloat16 both have: what backends
hold in 16 bits, scale and zero times scale, is then exact in float16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quant.canonical import CANONICAL_BITS
from quant.common.errors import CheckpointError, SpecError
from quant.gptq.format import GptqWeight
from quant.rounding import round_up_to_bfloat16
from quant.scheme import group_size

DAMPING = 0.01
"""Share of the mean diagonal of X^T X that is added to it (Frantar et al., section 3.3)."""

_MORE_DAMPING = 10.0
_MOST_DAMPING = 1.0
_BLOCK = 128
"""Columns of one block, as in Frantar et al.; all group sizes divide it, but not all whole rows."""

_CLIP_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
_SEARCHED_BITS = 4
"""The highest bitwidth with searched ranges: steps of higher ones are so fine that clipping a
weight costs more than it gains."""


@dataclass(frozen=True)
class GptqOptions:
    """Options of GPTQ. `symmetric`: the zero is the middle code, as some kernels require (Marlin).
    `act_order`: columns with the largest inputs are rounded first, under scales that are fixed
    before, so that columns stay in their places and kernels are not affected; else columns are
    rounded in their order, and each group's scale is chosen when it is reached. `damping`: share of
    the mean diagonal added to it.
    """

    symmetric: bool = False
    act_order: bool = True
    damping: float = DAMPING

    def __post_init__(self) -> None:
        if not 0 < self.damping <= _MOST_DAMPING:
            raise SpecError(f"damping is {self.damping}; it must be above 0 and at most 1")


def gptq(weight: torch.Tensor, gram: torch.Tensor, bits: int, options: GptqOptions) -> GptqWeight:
    """Round `weight` `[out, in]` for inputs whose X^T X is `gram` `[in, in]`, on their device.

    Groups are the usual ones (`quant.scheme.group_size`). It takes three times the memory of
    `gram`, and the weight in float32. SpecError for other bitwidths than 3, 4 and 8, and where
    `gram` cannot be inverted; CheckpointError for weights that are not finite or too large for
    float16 scales.
    """
    if bits not in CANONICAL_BITS:
        raise SpecError(f"cannot quantize to {bits} bits; choose one of 3, 4 and 8")
    columns = weight.shape[1]
    order = torch.arange(columns, device=weight.device)
    importance = gram.diagonal().clone()
    if options.act_order:
        order = importance.argsort(descending=True, stable=True)
    factor = _inverse_factor(gram[order][:, order], options.damping)
    grid = _Grid(weight, importance, bits, options.symmetric)
    if options.act_order:
        grid.choose_all(weight.float().t())
    codes = _round_columns(weight.float().t()[order], factor, grid, order)
    in_order = torch.empty_like(codes)
    in_order[order] = codes
    return GptqWeight(
        codes=in_order.t().contiguous().cpu(),
        scale=grid.scale.t().half().contiguous().cpu(),
        zero=grid.zero.t().to(torch.uint8).contiguous().cpu(),
        group_of_column=torch.arange(columns, dtype=torch.int32) // grid.group,
        bits=bits,
    )


class _Grid:
    """Scales (float32, of float16 values) and zeros `[groups, out]`, chosen group by group.

    `importance` `[in]`: the weight of each column in the error that is minimised.
    """

    def __init__(
        self, weight: torch.Tensor, importance: torch.Tensor, bits: int, symmetric: bool
    ) -> None:
        rows, columns = weight.shape
        self.bits = bits
        self.group = group_size(columns)
        self.scale = torch.zeros(columns // self.group, rows, device=weight.device)
        self.zero = torch.zeros_like(self.scale)
        self._importance = importance
        self._symmetric = symmetric

    def choose_all(self, values: torch.Tensor) -> None:
        """Choose scales and zeros of all groups for the weight `values` `[in, out]`."""
        for first in range(0, len(values), self.group):
            self.choose(first, values[first : first + self.group])

    def choose(self, first: int, values: torch.Tensor) -> None:
        """Choose those of the group of columns from `first` on, `values` `[group, out]`."""
        low, high = values.amin(0).clamp_(max=0), values.amax(0).clamp_(min=0)
        if not bool(torch.isfinite(high - low).all()):
            raise CheckpointError("it holds NaN or infinite values; the checkpoint is damaged")
        own = first // self.group
        least = torch.full_like(low, torch.inf)
        weights = self._importance[first : first + self.group].unsqueeze(-1)
        for factor in _CLIP_FACTORS if self.bits <= _SEARCHED_BITS else (1.0,):
            scale, zero = self._parameters(low * factor, high * factor)
            codes = _codes(values, scale, zero, self.bits)
            error = codes.sub_(zero).mul_(scale).sub_(values).square_().mul_(weights).sum(0)
            better = (error < least) | (factor == 1.0)
            least = torch.where(better, error, least)
            self.scale[own] = torch.where(better, scale, self.scale[own])
            self.zero[own] = torch.where(better, zero, self.zero[own])

    def _parameters(
        self, low: torch.Tensor, high: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero `[out]` whose codes reach from `low` to `high`, with zero between them."""
        largest = (1 << self.bits) - 1
        if self._symmetric:
            high = torch.maximum(low.neg(), high)
            low = high.neg()
        scale = round_up_to_bfloat16((high - low) / largest).half().float()
        if not bool(torch.isfinite(scale).all()):
            raise CheckpointError(
                "its values are too large for the float16 scales of the GPTQ format"
            )
        scale.masked_fill_(scale == 0, 1.0)
        if self._symmetric:
            return scale, torch.full_like(scale, 1 << (self.bits - 1))
        return scale, (low.neg() / scale).round_().clamp_(0, largest)


def _round_columns(
    values: torch.Tensor, factor: torch.Tensor, grid: _Grid, order: torch.Tensor
) -> torch.Tensor:
    """Round `values` `[in, out]`, which are overwritten, to uint8 codes; both in `order`."""
    columns, rows = values.shape
    codes = torch.empty(columns, rows, dtype=torch.uint8, device=values.device)
    groups = (order // grid.group).tolist()
    fixed = bool((grid.scale != 0).all())
    for first in range(0, columns, _BLOCK):
        end = min(first + _BLOCK, columns)
        errors = torch.empty(end - first, rows, device=values.device)
        for column in range(first, end):
            if not fixed and column % grid.group == 0:
                grid.choose(column, values[column : column + grid.group])
            scale, zero = grid.scale[groups[column]], grid.zero[groups[column]]
            code = _codes(values[column], scale, zero, grid.bits)
            codes[column] = code
            error = errors[column - first]
            torch.sub(values[column], code.sub_(zero).mul_(scale), out=error)
            error.div_(factor[column, column])
            values[column + 1 : end].addr_(factor[column, column + 1 : end], error, alpha=-1)
        values[end:].addmm_(factor[first:end, end:].t(), errors, alpha=-1)
    return codes


def _codes(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int
) -> torch.Tensor:
    """The nearest codes of `values` `[..., out]`, as float32."""
    return (values / scale).add_(zero).round_().clamp_(0, (1 << bits) - 1)


def _inverse_factor(gram: torch.Tensor, damping: float) -> torch.Tensor:
    """Compute the upper Cholesky factor of the inverse of the damped `gram`, which is overwritten.

    Inputs that were always zero get a diagonal of their own: their columns are rounded alone. The
    damping grows where float32 finds the matrix not positive definite.
    """
    diagonal = gram.diagonal().clone()
    if not bool(torch.isfinite(diagonal).all()):
        raise SpecError("calibration inputs are not finite; calibrate with --dtype float32")
    mean = float(diagonal.mean()) or 1.0
    diagonal.masked_fill_(diagonal == 0, mean)
    while damping <= _MOST_DAMPING:
        gram.diagonal().copy_(diagonal).add_(damping * mean)
        factor: torch.Tensor
        lower, failed = torch.linalg.cholesky_ex(gram)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            factor, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return factor
        damping *= _MORE_DAMPING
    raise SpecError(
        f"X^T X of {len(gram)} calibration inputs cannot be inverted even with "
        f"{_MOST_DAMPING:.0%} damping; calibrate on a longer text"
    )
