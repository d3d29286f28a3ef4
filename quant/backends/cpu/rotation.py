"""Rotating the inputs of a linear, so that no feature and no token stands out when it is rounded.

With a scale a token, one large activation makes the steps of all others coarse. Here each is spread
over 64 features by a Hadamard matrix H, whose inverse is H / 64: with inputs H x and weights
H w / 64 the product is that of x and w (QuaRot, Ashkboos et al. 2024, section 4, rotates before the
last linear of the MLP so). It needs no data, adds no byte, and helps with large features and with
large tokens alike. A feature that is far larger than all others is besides folded: x / f and w * f.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from quant.canonical import row_blocks
from quant.importance.statistics import InputStatistics
from quant.numba_loops import exact_loop, has_numba, torch_threads

LANES = 64
"""Features that are mixed: feature i with those that have the same i modulo `in / 64`."""

_SHRINK = 0.125
"""The root of 1 / 64: with it both sides of the product keep their magnitude."""

_PLAIN = 2.0
"""Folding begins at so many times the factor of the layer's median feature: factors of ordinary
features follow chance as much as the layer."""


_LEAST_NUMBERS = 2**17
"""Least numbers that are worth compiling a loop for."""


def rotate(values: Tensor) -> Tensor:
    """Multiply `values` float32 `[rows, in]` with H, `in` being a multiple of 64.

    Sums are taken in one order, whatever the number of rows: pairs, pairs of pairs, and so on.
    """
    rows, width = values.shape
    apart = width // LANES
    if values.numel() >= _LEAST_NUMBERS and values.device.type == "cpu" and has_numba():
        rotated = values.clone(memory_format=torch.contiguous_format)
        with torch_threads():
            _rotating_rows()(rotated.numpy(), apart)
        return rotated
    mixed = values
    while apart < width:
        pairs = mixed.reshape(rows, width // (2 * apart), 2, apart)
        one, other = pairs[:, :, 0], pairs[:, :, 1]
        mixed = torch.stack((one + other, one - other), 2).view(rows, width)
        apart *= 2
    return mixed


@cache
def compiled_rotation() -> Any:
    """A compiled function that rotates one token in place, with the sums of `rotate`: two of its
    turns at once, which halves the passes.
    """
    import numba

    def mix(values: Any, apart: int) -> None:
        while apart < len(values):
            for start in range(0, len(values), 4 * apart):
                lanes = values[start : start + 4 * apart]
                first, second = lanes[:apart], lanes[apart : 2 * apart]
                third, fourth = lanes[2 * apart : 3 * apart], lanes[3 * apart :]
                for i in range(apart):
                    a, b, c, d = first[i], second[i], third[i], fourth[i]
                    a, b, c, d = a + b, a - b, c + d, c - d
                    first[i], second[i], third[i], fourth[i] = a + c, b + d, a - c, b - d
            apart *= 4

    return numba.njit(mix)


@cache
def _rotating_rows() -> Any:
    mix = compiled_rotation()

    def rotate_rows(rows: Any, apart: int) -> None:
        for row in range(len(rows)):
            mix(rows[row], apart)

    return exact_loop(rotate_rows, parallel=False)


def input_factor(weight: Tensor, inputs: InputStatistics | None) -> Tensor:
    """What to multiply each input with before it is rotated, float32 `[in]`.

    `weight`: `[out, in]`. With f the factors of the weights, the errors of rounded activations and
    of rounded weights both grow as sum(E[x^2] / f^2) * sum(w^2 * f^2), which is least where f^2 is
    the magnitude of the input over that of its column.
    """
    plain = torch.full((weight.shape[1],), _SHRINK, device=weight.device)
    if inputs is None:
        return plain
    squares = torch.zeros(weight.shape[1], device=weight.device)
    for block in row_blocks(weight.shape[0], weight.shape[1], weight.device):
        squares += weight[block].float().square().sum(0)
    column = squares.sqrt_()
    size = inputs.mean_square.to(weight.device).sqrt()
    ratio = torch.where((size > 0) & (column > 0), size / column, 0.0).sqrt()
    usual = ratio[ratio > 0].median() if bool((ratio > 0).any()) else ratio.new_ones(())
    return plain / (ratio / (_PLAIN * usual)).clamp(min=1.0)


def rotated_weight(weight: Tensor, factor: Tensor) -> Tensor:
    """Weight float32 `[rows, in]` for inputs that are multiplied with `factor` and rotated."""
    return rotate(weight.float() * (_SHRINK**2 / factor))


def restored_weight(rotated: Tensor, factor: Tensor) -> Tensor:
    """Weight `[rows, in]` for plain inputs that does what `rotated` does for rotated ones."""
    return rotate(rotated) * factor


def rotated_statistics(inputs: InputStatistics, factor: Tensor) -> InputStatistics:
    """Statistics of the inputs times `factor`, rotated, if features are not correlated.

    `largest` is then a bound.
    """
    factor = factor.to(inputs.mean_square.device)
    lanes = (LANES, -1)
    mean_square = (inputs.mean_square * factor.square()).view(lanes).sum(0)
    largest = (inputs.largest * factor).view(lanes).sum(0)
    return InputStatistics(mean_square.repeat(LANES), largest.repeat(LANES))
