"""Rotating the inputs of a linear, so that no feature and no token stands out when it is rounded.

With a scale a token, one large activation makes the steps of all others coarse. Here each is spread
over 64 features by a Hadamard matrix H, whose inverse is H / 64: inputs H x and weights H w / 64
give the product of x and w (QuaRot, Ashkboos et al. 2024, section 4, rotates before the last linear
of the MLP so). It needs no data and adds no byte. A feature far larger than all others is besides
folded: x / f and w * f.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from quant.devices import moved_blocks, row_blocks
from quant.numba_loops import compiled_loop, has_numba, matrix_at, torch_threads, widening
from quant.rounding.canonical import CanonicalWeight, dequantize, quantize
from quant.rounding.importance import InputStatistics
from quant.rounding.ways import DEFAULT, Rounding

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
    """Multiply float32 `[rows, in]` with H, `in` a multiple of 64, summing pairs, pairs of pairs,
    and so on.
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
    """Compile the sums of `rotate` for one token in place, two turns at once, which halves the
    passes.
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

    return compiled_loop(rotate_rows, parallel=False, exact=True)


def input_factor(
    weight: Tensor, inputs: InputStatistics | None, device: torch.device | None = None
) -> Tensor:
    """Factors f `[in]` before the rotation for `weight` `[out, in]`, on `device`: errors of rounded
    activations and of weights grow as sum(E[x^2] / f^2) * sum(w^2 * f^2), least where f^2 is the
    magnitude of the input over that of its column.
    """
    device = device or weight.device
    plain = torch.full((weight.shape[1],), _SHRINK, device=device)
    if inputs is None:
        return plain
    squares = torch.zeros(weight.shape[1], device=device)
    for _, rows in moved_blocks(weight, row_blocks(len(weight), weight.shape[1], device), device):
        squares += rows.float().square().sum(0)
    column = squares.sqrt_()
    size = inputs.mean_square.to(device).sqrt()
    ratio = torch.where((size > 0) & (column > 0), size / column, 0.0).sqrt()
    usual = ratio[ratio > 0].median() if bool((ratio > 0).any()) else ratio.new_ones(())
    return plain / (ratio / (_PLAIN * usual)).clamp(min=1.0)


def rotated_weight(weight: Tensor, factor: Tensor) -> Tensor:
    return rotate(weight.float() * (_SHRINK**2 / factor))


LIMIT = 127
MIDDLE = 128
_LEAST_MAXIMUM = 1e-30
"""The largest magnitude that a token of zeros is given, so that its codes and results are zeros."""

_LEAST_CODES = 2**10
"""Least numbers for the compiled loop: small models need not wait for the compiler."""

_TOKENS_FOR_THREADS = 16
"""Least tokens for several threads: fewer are done before a second thread has begun."""

_READ = (torch.bfloat16, torch.float32)
"""The types that the compiled loop reads."""


def round_activations(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate `x * factor` and round it to uint8 codes `[tokens, in]` and float32 scales `[tokens,
    1]`. A token's codes depend neither on others nor on which of both ways computes them; a token
    with a number that is not finite has such a scale.
    """
    compiled = x.device.type == "cpu" and x.dtype in _READ and x.numel() >= _LEAST_CODES
    if not compiled or not has_numba():
        values = rotate(x.to(torch.float32) * factor)
        largest = values.abs().amax(-1, keepdim=True).clamp_(min=_LEAST_MAXIMUM)
        steps = torch.full_like(largest, LIMIT).div_(largest)  # a number / tensor rounds twice
        codes = values.mul_(steps).add_(MIDDLE + 0.5).to(torch.uint8)  # which rounds down
        return codes, largest / LIMIT
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scale = torch.empty(len(x), 1)
    loop = _rounding(x.dtype, len(x) >= _TOKENS_FOR_THREADS and torch.get_num_threads() > 1)
    held = x.contiguous(), factor.contiguous(), codes, scale
    with torch_threads():
        loop(tuple(each.data_ptr() for each in held), tuple(x.shape))
    return codes, scale


def warm_up_rounding(width: int) -> None:
    for tokens in (_TOKENS_FOR_THREADS - 1, _TOKENS_FOR_THREADS):
        round_activations(torch.zeros(tokens, width, dtype=torch.bfloat16), torch.ones(width))


@cache
def _rounding(dtype: torch.dtype, parallel: bool) -> Any:
    """Compile the loop, which works while a token is in the core's cache, where torch takes twenty
    passes. It compares magnitudes as integers, in which NaN is above infinity.
    """
    import numba

    widen, mix = widening(dtype), compiled_rotation()
    matrix, floats, bytes_at = (matrix_at(each) for each in (dtype, torch.float32, torch.uint8))
    no_sign, zero = np.uint32(0x7FFFFFFF), np.uint32(0)
    least, limit = np.float32(_LEAST_MAXIMUM), np.float32(LIMIT)
    middle = np.float32(MIDDLE + 0.5)

    def keep(scale: int, token: int, number: Any) -> None:
        floats(scale, token + 1, 1)[token, 0] = number

    # as a call: numba drops a write in a parallel loop to what it takes for an array of the loop's
    keep_scale = compiled_loop(keep, parallel=False)

    def round_tokens(where: tuple[int, int, int, int], shape: tuple[int, int]) -> None:
        (numbers, factor, codes, scale), (tokens, width) = where, shape
        for token in numba.prange(tokens):
            row, own = matrix(numbers, tokens, width)[token], bytes_at(codes, tokens, width)[token]
            factors, values = floats(factor, 1, width)[0], np.empty(width, np.float32)
            for i in range(width):
                values[i] = widen(row[i]) * factors[i]
            mix(values, width // LANES)
            bits, largest = values.view(np.uint32), zero
            for i in range(width):
                largest = max(largest, bits[i] & no_sign)
            magnitude = np.uint32(largest).view(np.float32)
            magnitude = least if magnitude < least else magnitude
            keep_scale(scale, token, magnitude / limit)
            steps = limit / magnitude
            for i in range(width):
                own[i] = np.uint8(np.int32(values[i] * steps + middle))

    return compiled_loop(round_tokens, parallel, exact=True)


@dataclass(frozen=True, eq=False)
class RotatedCodes:
    """A weight of `codes` int8 `[out, in]` with `scale` `[out]`, for inputs times `factor` `[in]`,
    rotated. Kernels pack the codes; `forward` computes in float32 what they compute, for machines
    that lack their instructions.
    """

    codes: Tensor
    scale: Tensor
    factor: Tensor

    @classmethod
    def of_weight(
        cls, weight: Tensor, rounding: Rounding = DEFAULT, device: torch.device | None = None
    ) -> Self:
        """Round `weight` `[out, in]`, `in` a multiple of 64, on `device`; CheckpointError unless
        finite.
        """
        factor = input_factor(weight, rounding.inputs, device)

        def quantized(block: slice, rows: Tensor) -> CanonicalWeight:
            own = Rounding(rounding.mode, rounding.seed + block.start)
            return quantize(rotated_weight(rows, factor), 8, rounding=own)

        return cls._of_blocks(weight, quantized, factor)

    @classmethod
    def of_canonical(cls, canonical: CanonicalWeight) -> Self:
        codes = canonical.codes
        factor = input_factor(codes, None)

        def quantized(block: slice, rows: Tensor) -> CanonicalWeight:
            own = replace(canonical, codes=rows, scale=canonical.scale[block])
            return quantize(rotated_weight(dequantize(own), factor), 8)

        return cls._of_blocks(codes, quantized, factor)

    @classmethod
    def _of_blocks(
        cls, weight: Tensor, quantized: Callable[[slice, Tensor], CanonicalWeight], factor: Tensor
    ) -> Self:
        device = factor.device
        codes = torch.empty(weight.shape, dtype=torch.int8, device=device)
        scale = torch.empty(len(weight), device=device)
        for block, rows in moved_blocks(
            weight, row_blocks(len(weight), weight.shape[1], device), device
        ):
            part = quantized(block, rows)
            codes[block], scale[block] = part.codes, part.scale.view(-1)
        return cls(codes, scale, factor)

    def rows(self, which: Tensor) -> Tensor:
        return replace(self, codes=self.codes[which], scale=self.scale[which]).restored()

    def restored(self) -> Tensor:
        return rotate(self.codes.float() * self.scale.unsqueeze(-1)) * self.factor

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = round_activations(x.reshape(-1, x.shape[-1]), self.factor)
        sums = (codes.float() - MIDDLE) @ self.codes.t().float()
        out = sums.mul_(self.scale).mul_(scale)
        return out.to(x.dtype).view(*x.shape[:-1], len(self.codes))
