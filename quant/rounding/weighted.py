"""Fitting scale and zero of each group to its weights, columns weighed by their inputs.

The error of an output of a linear is sum_j (w_j - q_j) x_j. Over many tokens its square weighs each
column by h_j = E[x_j^2], products of different columns left out. Under these weights scale and zero
are fitted (`quant.rounding.group_fit`): large matrices on a CPU in the loop that
`quant.rounding.weighted_loop` compiles, all others by torch in steps of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.common.errors import SpecError
from quant.numba_loops import as_array, has_numba, torch_threads
from quant.rounding.group_fit import CodeSums, Grid, Moments, fit_groups
from quant.rounding.importance import InputStatistics
from quant.rounding.weighted_loop import group_fit

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
    return _fit_in_torch(weight, importance, bits, group, grid, factor)


def _fit_compiled(
    weight: Tensor, importance: Tensor, bits: int, group: int, grid: Grid, factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, int]:
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    scale = torch.empty(rows, columns // group)
    zero = torch.empty_like(scale)
    bad = torch.empty(rows, dtype=torch.int32)
    factor = torch.ones(rows) if factor is None else factor.flatten()
    loop = group_fit(weight.dtype, bits, grid, torch.get_num_threads() > 1)
    with torch_threads():
        loop(*map(as_array, (weight, importance, factor, codes, scale, zero, bad)))
    return codes, scale, zero, int(bad.sum())


def _fit_in_torch(
    weight: Tensor, importance: Tensor, bits: int, group: int, grid: Grid, factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, int]:
    values = weight.float().contiguous().unflatten(1, (-1, group))  # sums have the order of memory
    groups = _TensorGroups(values, importance.to(values.device).view(1, *values.shape[1:]))
    found = fit_groups(groups, bits, grid, factor)
    codes = groups.codes(found.step, found.low, (1 << bits) - 1).to(torch.uint8)
    bad = found.scale.numel() - int(found.place.range.isfinite().sum())
    return codes.flatten(1), found.scale, found.zero, bad


@dataclass
class _TensorGroups:
    """Weights `[rows, groups, group]` and the importance of their columns `[1, groups, group]`."""

    weights: Tensor
    importance: Tensor

    def extremes(self) -> tuple[Tensor, Tensor]:
        return self.weights.amin(-1), self.weights.amax(-1)

    def place(self, middle: Tensor, inverse: Tensor) -> Moments:
        self.weights = (self.weights - middle.unsqueeze(-1)).mul_(inverse.unsqueeze(-1))
        weighted = self.weights * self.importance
        count = self.importance.sum(-1).expand(self.weights.shape[:2])
        square = (weighted * self.weights).sum(-1)
        return Moments(count.double(), weighted.sum(-1).double(), square.double())

    def sums(self, step: Tensor, low: Tensor, top: int) -> CodeSums:
        codes = self.codes(step, low, top)
        weighted = codes * self.importance
        square = codes.mul_(weighted).sum(-1)
        product = torch.mul(weighted, self.weights, out=codes).sum(-1)
        return CodeSums(weighted.sum(-1).double(), square.double(), product.double())

    def sums_and_error(self, step: Tensor, low: Tensor, top: int) -> tuple[CodeSums, Tensor]:
        values = self.codes(step, low, top).mul_(step.unsqueeze(-1)).add_(low.unsqueeze(-1))
        error = values.sub_(self.weights).square_().mul_(self.importance).sum(-1)
        return self.sums(step, low, top), error

    def codes(self, step: Tensor, low: Tensor, top: int) -> Tensor:
        inverse = step.reciprocal()
        position = self.weights * inverse.unsqueeze(-1)
        position.add_((0.5 - low * inverse).unsqueeze(-1))
        return position.nan_to_num_(0.0).clamp_(0, top + 0.5).floor_()
