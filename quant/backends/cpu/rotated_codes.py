"""Weights of 8 bit for rotated inputs, and their product with activations rounded to 8 bit.

Kernels pack the codes; the product here, in float32, is what they compute, for machines that lack
their instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from quant.backends.cpu.activation_codes import MIDDLE, round_activations
from quant.backends.cpu.rotation import (
    input_factor,
    restored_weight,
    rotated_statistics,
    rotated_weight,
)
from quant.canonical import CanonicalWeight, dequantize, quantize, row_blocks
from quant.importance.statistics import InputStatistics
from quant.rounding.ways import DEFAULT, Rounding


@dataclass(frozen=True, eq=False)
class RotatedCodes:
    """A weight of `codes` int8 `[out, in]` with `scale` float32 `[out]`, for inputs that are
    multiplied with `factor` float32 `[in]` and rotated.
    """

    codes: Tensor
    scale: Tensor
    factor: Tensor

    @classmethod
    def of_weight(
        cls,
        weight: Tensor,
        rounding: Rounding = DEFAULT,
        inputs: InputStatistics | None = None,
    ) -> Self:
        """Round `weight` `[out, in]` (any float type), `in` being a multiple of 64.

        Works through blocks of rows; CheckpointError for weights that are not finite.
        """
        factor = input_factor(weight, inputs)
        rotated = None if inputs is None else rotated_statistics(inputs, factor)

        def quantized(block: slice) -> CanonicalWeight:
            own = replace(rounding, seed=rounding.seed + block.start)
            return quantize(rotated_weight(weight[block], factor), 8, rounding=own, inputs=rotated)

        return cls._of_blocks(weight, quantized, factor)

    @classmethod
    def of_canonical(cls, canonical: CanonicalWeight) -> Self:
        """Rotate 8-bit codes that were chosen already, which rounds them once more."""
        codes = canonical.codes
        factor = input_factor(codes, None)

        def quantized(block: slice) -> CanonicalWeight:
            own = replace(canonical, codes=codes[block], scale=canonical.scale[block])
            return quantize(rotated_weight(dequantize(own), factor), 8)

        return cls._of_blocks(codes, quantized, factor)

    @classmethod
    def _of_blocks(
        cls, weight: Tensor, quantized: Callable[[slice], CanonicalWeight], factor: Tensor
    ) -> Self:
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scale = torch.empty(len(weight), device=weight.device)
        for block in row_blocks(weight.shape[0], weight.shape[1], weight.device):
            part = quantized(block)
            codes[block], scale[block] = part.codes, part.scale.view(-1)
        return cls(codes, scale, factor)

    def restored(self) -> Tensor:
        """The float32 weight `[out, in]` for plain inputs that the codes stand for."""
        return restored_weight(self.codes.float() * self.scale.unsqueeze(-1), self.factor)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply `x` `[..., in]`, rounded as the kernel rounds it: `[..., out]` in its type."""
        codes, scale = round_activations(x.reshape(-1, x.shape[-1]), self.factor)
        sums = (codes.float() - MIDDLE) @ self.codes.t().float()
        out = sums.mul_(self.scale).mul_(scale)
        return out.to(x.dtype).view(*x.shape[:-1], len(self.codes))
