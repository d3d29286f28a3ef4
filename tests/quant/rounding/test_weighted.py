"""The fit of scales and zeros, against searches in float64 and between its two implementations."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.common.errors import SpecError
from quant.narrow import range_factor
from quant.numba_loops import has_numba
from quant.rounding.canonical import dequantize, quantize
from quant.rounding.group_fit import GRIDS, Grid
from quant.rounding.importance import InputStatistics
from quant.rounding.ways import Rounding
from quant.rounding.weighted import column_importance, fit
from quant.scheme import AFFINE_BITS

NEAREST, WEIGHTED = Rounding("nearest"), Rounding("weighted")
WAYS = [False, pytest.param(True, marks=pytest.mark.skipif(not has_numba(), reason="no numba"))]


def problem(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, InputStatistics]:
    """A weight with some large values, and inputs of which a few are large."""
    generator = torch.Generator().manual_seed(seed)
    weight = 0.05 * torch.randn(rows, columns, generator=generator)
    weight *= 1 + 3 * (torch.rand(rows, columns, generator=generator) < 0.02)
    squares = torch.rand(columns, generator=generator) ** 4 + 1e-3
    squares[torch.randint(columns, (2,), generator=generator)] = 50.0
    return weight, InputStatistics(squares, squares.sqrt())


def fitted(
    weight: Tensor, importance: Tensor, bits: int, group: int, grid: Grid, compiled: bool
) -> tuple[Tensor, Tensor, Tensor, int]:
    """What `fit` gives, with the rows' powers of two where it needs them."""
    factor = None
    if grid == "narrow":
        grouped = weight.float().unflatten(1, (-1, group))
        factor = range_factor(grouped.amin(-1), grouped.amax(-1), bits)
    return fit(weight, importance, bits, group, grid, compiled, factor)


def restored(found: tuple[Tensor, Tensor, Tensor, int], bits: int, grid: Grid) -> Tensor:
    """The float64 weight of what `fit` gives."""
    codes, scale, zero, bad = found
    assert bad == 0
    assert int(codes.max()) < 1 << bits
    grouped = codes.double().unflatten(1, (scale.shape[1], -1))
    scale, zero = scale.double().unsqueeze(-1), zero.double().unsqueeze(-1)
    is_code = grid in ("integer", "middle")
    values = grouped - zero if is_code else grouped - (1 << (bits - 1)) + zero / scale
    weight: Tensor = (values * scale).flatten(1)
    return weight


def group_errors(weight: Tensor, rounded: Tensor, importance: Tensor, groups: int) -> Tensor:
    error = (weight.double() - rounded.double()).square() * importance.double()
    by_group: Tensor = error.unflatten(1, (groups, -1)).sum(-1)
    return by_group


def best_of_all(
    weight: np.ndarray, importance: np.ndarray, bits: int, zeros: range | None
) -> float:
    """The least weighted error of any scale and zero on a fine grid, in float64."""
    top, spread = 2**bits - 1, weight.max() - weight.min()
    best = np.inf
    for scale in np.linspace(0.1, 2.1, 400) * spread / top:
        if zeros is None:
            lows = weight.min() + np.linspace(-0.3, 0.8, 200) * spread
        else:
            lows = -scale * np.array(zeros)
        codes = np.clip(np.rint((weight - lows[:, None]) / scale), 0, top)
        errors = ((codes * scale + lows[:, None] - weight) ** 2 * importance).sum(1)
        best = min(best, float(errors.min()))
    return best


def best_narrow(weight: np.ndarray, importance: np.ndarray, bits: int) -> float:
    """The least weighted error of every scale and zero that two bytes hold, in float64."""
    top, half, best = 2**bits - 1, 2 ** (bits - 1), np.inf
    least = 2.0 ** np.floor(np.log2(np.ptp(weight) / top)) / 128
    for scale in least * np.arange(32, 256):
        exact = (np.arange(256) - 128) / {5: 8, 6: 4}.get(bits, 16) * scale
        zeros = (exact.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
        lows = zeros.astype(np.float64)[:, None] - half * scale
        codes = np.clip(np.rint((weight - lows) / scale), 0, top)
        best = min(best, float(((codes * scale + lows - weight) ** 2 * importance).sum(1).min()))
    return best


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize(
    ("bits", "size", "grid"),
    [*((3, 16, grid) for grid in GRIDS), (4, 32, "free")]
    + [(bits, 32, "narrow") for bits in (4, 5, 6)]
    + [(8, 64, "middle")],
)
def test_error_is_near_the_least_possible(bits: int, size: int, grid: Grid, compiled: bool) -> None:
    """Alternating ends in local minima, but in sum it is within 15 % of the search, from 6 bit
    on 25 %.
    """
    weight, importance = even_problem(size)
    found = restored(fitted(weight, importance, bits, size, grid, compiled), bits, grid)
    error = group_errors(weight, found, importance, 1).squeeze(1)
    assert float(error.sum()) < (1.25 if bits >= 6 else 1.15) * least_error(bits, size, grid)


@cache
def least_error(bits: int, size: int, grid: Grid) -> float:
    """That of the search, over all groups, which both ways of fitting are held against."""
    weight, importance = even_problem(size)
    if grid == "narrow":
        own = importance.double().numpy()
        return sum(best_narrow(row, own, bits) for row in weight.double().numpy())
    half = 1 << (bits - 1)
    zeros = {"free": None, "integer": range(2 * half), "middle": range(half, half + 1)}[grid]
    return sum(
        best_of_all(row, importance.double().numpy(), bits, zeros)
        for row in weight.double().numpy()
    )


def even_problem(size: int) -> tuple[Tensor, Tensor]:
    """A weight, and importance that no two columns alone make up."""
    weight, inputs = problem(16, size, seed=1)
    squares = inputs.mean_square.clamp(max=1.0)
    return weight, column_importance(InputStatistics(squares, squares.sqrt()), size)


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_no_group_is_worse_than_nearest(bits: int, compiled: bool) -> None:
    for scale, offset in ((1.0, 0.0), (1e-12, 0.0), (1e12, 0.0), (1.0, 0.7), (1e-3, 5.0)):
        weight, inputs = problem(16, 256)
        weight = weight * scale + offset
        importance = column_importance(inputs, 256)
        found = restored(fitted(weight, importance, bits, 32, "narrow", compiled), bits, "narrow")
        nearest = quantize(weight, bits, rounding=NEAREST)
        assert nearest.zero is not None
        plain = restored((nearest.codes, nearest.scale, nearest.zero, 0), bits, "narrow")
        errors = [group_errors(weight, each, importance, 8) for each in (found, plain)]
        assert (errors[0] <= errors[1] * (1 + 1e-4)).all()
        if offset == 0:
            assert float(errors[0].sum() / errors[1].sum()) < 0.7


@pytest.mark.skipif(not has_numba(), reason="no numba")
@pytest.mark.parametrize(
    ("dtype", "grid", "bits"),
    [
        *product([torch.float32], GRIDS, [3]),
        (torch.float32, "narrow", 5),
        *product([torch.float16, torch.bfloat16], ["narrow"], [4]),
        # Each is a loop to compile for a second; the search holds narrow ones of all bits.
        *(
            pytest.param(*each, marks=pytest.mark.rare)
            for each in product([torch.float16, torch.bfloat16, torch.float32], GRIDS, [3, 5])
        ),
    ],
)
def test_both_ways_give_the_same_codes(dtype: torch.dtype, grid: Grid, bits: int) -> None:
    """Sums in another order may lead to another of two solutions that are as good."""
    weight, inputs = problem(48, 192, seed=2)
    weight, importance = weight.to(dtype), column_importance(inputs, 192)
    compiled, plain = (fitted(weight, importance, bits, 64, grid, way) for way in (True, False))
    assert (compiled[1] == plain[1]).float().mean() > 0.97
    assert (compiled[0] == plain[0]).float().mean() > 0.98
    errors = [
        group_errors(weight, restored(each, bits, grid), importance, 3).sum()
        for each in (compiled, plain)
    ]
    assert float(errors[0] / errors[1]) == pytest.approx(1, abs=0.002)


@pytest.mark.parametrize("compiled", WAYS)
def test_what_is_stored_is_bfloat16_and_codes(compiled: bool) -> None:
    weight, inputs = problem(8, 128)
    for grid in GRIDS:
        _, scale, zero, _ = fitted(weight, column_importance(inputs, 128), 3, 64, grid, compiled)
        assert torch.equal(scale.bfloat16().float(), scale)
        assert (scale > 0).all()
        if grid in ("free", "narrow"):
            assert torch.equal(zero.bfloat16().float(), zero)
        else:
            assert ((zero == zero.round()) & (zero >= 0) & (zero <= 7)).all()
        if grid == "middle":
            assert (zero == 4).all()


@pytest.mark.parametrize("compiled", WAYS)
def test_damaged_groups_are_counted(compiled: bool) -> None:
    weight, _ = problem(4, 128)
    weight[1, 3], weight[1, 70], weight[2, 5], weight[2, 6] = torch.nan, torch.inf, 3e38, -3e38
    assert fit(weight, torch.ones(128), 4, 64, "free", compiled)[3] == 3


def test_large_and_small_matrices_agree() -> None:
    """A matrix that is compiled has the error that its rows have alone, in blocks of any size."""
    weight, inputs = problem(700, 512)
    whole = quantize(weight, 4, rounding=Rounding(inputs=inputs))
    alone = quantize(weight[:100], 4, rounding=Rounding(inputs=inputs))
    assert (whole.codes[:100] == alone.codes).float().mean() > 0.99
    later = quantize(weight[600:], 4, rounding=Rounding(inputs=inputs))
    assert (whole.codes[600:] == later.codes).float().mean() > 0.99


def test_inputs_decide_on_what_is_kept() -> None:
    weight, inputs = problem(32, 256)
    plain, weighed = (
        quantize(weight, 3, rounding=Rounding(inputs=each)) for each in (None, inputs)
    )
    importance = column_importance(inputs, 256)
    by_inputs = [group_errors(weight, dequantize(w), importance, 2).sum() for w in (plain, weighed)]
    assert float(by_inputs[1] / by_inputs[0]) < 0.6
    ones = torch.ones(256)
    by_weights = [group_errors(weight, dequantize(w), ones, 2).sum() for w in (plain, weighed)]
    assert by_weights[0] < by_weights[1]
    nearest = group_errors(weight, dequantize(quantize(weight, 3, rounding=NEAREST)), ones, 2).sum()
    assert by_weights[0] < 0.8 * nearest


def test_rows_of_8_bit_are_fitted_to_what_they_multiply() -> None:
    weight, inputs = problem(600, 512)
    importance = column_importance(inputs, 512)
    found, nearest = (
        group_errors(weight, dequantize(quantize(weight, 8, rounding=way)), importance, 1)
        for way in (Rounding(inputs=inputs), NEAREST)
    )
    assert float(found.sum() / nearest.sum()) < 0.8
    few = dequantize(quantize(weight[:8], 8, rounding=Rounding(inputs=inputs)))
    assert float(group_errors(weight[:8], few, importance, 1).sum() / found[:8].sum()) < 1.05


def test_the_unit_of_the_inputs_does_not_matter() -> None:
    weight, inputs = problem(8, 128)
    other = InputStatistics(inputs.mean_square * 1024, inputs.largest * 32)
    assert torch.equal(
        quantize(weight, 4, rounding=Rounding(inputs=inputs)).codes,
        quantize(weight, 4, rounding=Rounding(inputs=other)).codes,
    )
    silent = InputStatistics(torch.zeros(128), torch.zeros(128))
    assert torch.equal(
        quantize(weight, 4, rounding=Rounding(inputs=silent)).codes, quantize(weight, 4).codes
    )


def test_statistics_that_cannot_be_used() -> None:
    weight, inputs = problem(4, 64)
    with pytest.raises(SpecError, match=r"statistics of \[64\] inputs for a weight of 32 columns"):
        quantize(weight[:, :32], 4, rounding=Rounding(inputs=inputs))
    inputs.mean_square[3] = torch.nan
    with pytest.raises(SpecError, match="not finite"):
        quantize(weight, 4, rounding=Rounding(inputs=inputs))
