"""GPTQ: rounding a weight column by column so that its outputs on calibration inputs change least.

Frantar et al., "GPTQ" (ICLR 2023), Algorithm 1. For inputs X `[tokens, in]` the error of a row w is
(w - q) X^T X (w - q)^T. Columns are rounded in turn, and what a column is off by is made up for in
those that follow: by its error over the diagonal of the upper Cholesky factor of the inverse of
X^T X, times the rest of the factor's row. Columns wait in blocks for the errors of earlier blocks.

Scale and zero fit a group's weights before, weighed by squared inputs (`quant.rounding.weighted`).
As the checkpoint format has it (`quant.rounding.encoding`), the zero is a code, and scales are
values that float16, the format's type, and bfloat16 both have: what backends hold in 16 bits, scale
and zero times scale, is then exact in float16. Groups of `GptqOptions.narrow` have a zero between
codes: on SmolLM2 at 4 bit they lose less than half as much (`docs/quantization.md`).
"""

from __future__ import annotations

import torch

from quant.checkpoint.codes import GroupCodes
from quant.common.errors import CheckpointError, SpecError
from quant.devices import row_blocks
from quant.narrow import range_factor
from quant.rounding.canonical import CANONICAL_BITS
from quant.rounding.group_fit import Grid
from quant.rounding.weighted import even_importance, fit, is_compiled
from quant.scheme import MOST_DAMPING, NARROW_GROUP, GptqOptions

_MORE_DAMPING = 10.0
_BLOCK = 128
"""Columns of one block, as in Frantar et al.; all group sizes divide it, but not all whole rows."""


def gptq(weight: torch.Tensor, gram: torch.Tensor, bits: int, options: GptqOptions) -> GroupCodes:
    """Round `weight` `[out, in]` for inputs whose X^T X is `gram` `[in, in]`, on their device, in
    three times the memory of `gram` and the weight in float32. SpecError for other bitwidths than 3
    to 6 and 8, and where `gram` cannot be inverted; CheckpointError for weights that are not finite
    or too large for float16 scales.
    """
    if bits not in CANONICAL_BITS:
        raise SpecError(
            f"cannot quantize to {bits} bits; choose one of {', '.join(map(str, CANONICAL_BITS))}"
        )
    columns = weight.shape[1]
    order = torch.arange(columns, device=weight.device)
    diagonal = gram.diagonal().clone()
    if options.act_order:
        order = diagonal.argsort(descending=True, stable=True)
    factor = _inverse_factor(gram[order][:, order], options.damping)
    scales = _Scales(weight, even_importance(diagonal, columns), bits, options)
    if options.act_order or scales.is_narrow:
        scales.choose_all(weight)
    codes = _round_columns(weight.float().t()[order], factor, scales, order)
    in_order = torch.empty_like(codes)
    in_order[order] = codes
    scale, zero = scales.stored()
    return GroupCodes(
        codes=in_order.t().contiguous().cpu(),
        scale=scale.contiguous().cpu(),
        zero=zero.to(torch.uint8).contiguous().cpu(),
        group_of_column=torch.arange(columns, dtype=torch.int32) // scales.group,
        bits=bits,
        low=None if scales.low is None else scales.low.cpu(),
        narrow=scales.is_narrow,
    )


class _Scales:
    """Scales and zeros `[groups, out]`, float32: a weight is (code - zero) * scale. `importance`
    `[in]` weighs columns in the error that is minimised. `low` `[out, groups]`, of narrow groups:
    what the middle code stands for.
    """

    def __init__(
        self, weight: torch.Tensor, importance: torch.Tensor, bits: int, options: GptqOptions
    ) -> None:
        rows, columns = weight.shape
        self.bits = bits
        self.group = options.group(columns, bits)
        self.is_narrow = options.narrow and self.group == NARROW_GROUP and bits != 8
        self.low: torch.Tensor | None = None
        if self.is_narrow:
            self.low = torch.empty(rows, columns // self.group, device=weight.device)
        self.scale = torch.zeros(columns // self.group, rows, device=weight.device)
        self.zero = torch.zeros_like(self.scale)
        self._importance = importance
        self._grid: Grid = "middle" if options.symmetric else "integer"
        self._compiled = is_compiled(weight, weight.device)

    def choose_all(self, weight: torch.Tensor) -> None:
        for block in row_blocks(weight.shape[0], weight.shape[1], weight.device):
            if self.is_narrow:
                self._choose_narrow(weight[block], block)
                continue
            self._choose(weight[block], block, slice(0, len(self.scale)))

    def choose(self, first: int, values: torch.Tensor) -> None:
        own = first // self.group
        self._choose(values.t(), slice(None), slice(own, own + 1))

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zeros `[out, groups]` as the format holds them."""
        if self.is_narrow:
            return self.scale.t().bfloat16(), torch.full_like(self.zero.t(), self._half)
        return self.scale.t().half(), self.zero.t()

    @property
    def _half(self) -> int:
        return 1 << (self.bits - 1)

    def _choose_narrow(self, weight: torch.Tensor, rows: slice) -> None:
        assert self.low is not None, "kept for these groups"
        grouped = weight.float().unflatten(1, (-1, self.group))
        factor = range_factor(grouped.amin(-1), grouped.amax(-1), self.bits)
        _, scale, low, bad = fit(
            weight, self._importance, self.bits, self.group, "narrow", self._compiled, factor
        )
        _check_finite(bad)
        self.scale[:, rows], self.low[rows] = scale.t(), low
        self.zero[:, rows] = (self._half - low / scale).t()

    def _choose(self, weight: torch.Tensor, rows: slice, groups: slice) -> None:
        columns = slice(groups.start * self.group, groups.stop * self.group)
        _, scale, zero, bad = fit(
            weight, self._importance[columns], self.bits, self.group, self._grid, self._compiled
        )
        _check_finite(bad)
        scale = scale.half().float()
        if not bool(torch.isfinite(scale).all()):
            raise CheckpointError(
                "its values are too large for the float16 scales of the GPTQ format"
            )
        scale.masked_fill_(scale == 0, 1.0)
        self.scale[groups, rows], self.zero[groups, rows] = scale.t(), zero.t()


def _check_finite(bad: int) -> None:
    if bad:
        raise CheckpointError("it holds NaN or infinite values; the checkpoint is damaged")


def _round_columns(
    values: torch.Tensor, factor: torch.Tensor, scales: _Scales, order: torch.Tensor
) -> torch.Tensor:
    """Round `values` `[in, out]`, which are overwritten, to uint8 codes; both in `order`."""
    columns, rows = values.shape
    codes = torch.empty(columns, rows, dtype=torch.uint8, device=values.device)
    groups = (order // scales.group).tolist()
    fixed = bool((scales.scale != 0).all())
    for first in range(0, columns, _BLOCK):
        end = min(first + _BLOCK, columns)
        errors = torch.empty(end - first, rows, device=values.device)
        for column in range(first, end):
            if not fixed and column % scales.group == 0:
                scales.choose(column, values[column : column + scales.group])
            scale, zero = scales.scale[groups[column]], scales.zero[groups[column]]
            code = _codes(values[column], scale, zero, scales.bits)
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
    while damping <= MOST_DAMPING:
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
        f"{MOST_DAMPING:.0%} damping; calibrate on a longer text"
    )
