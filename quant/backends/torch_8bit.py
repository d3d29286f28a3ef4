"""8 bit in pure torch: one code a byte, decoded a few rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from quant.backends.base import linear_by_blocks, tensor_bytes
from quant.canonical import CanonicalWeight, decode, dequantize, quantize


@dataclass(frozen=True)
class Torch8Bit:
    """`codes` `[out, in]` int8; `scale` `[out, 1]` float32."""

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        """Hold 8-bit codes as they are."""
        return cls(canonical.codes, canonical.scale)

    @classmethod
    def from_weight(cls, weight: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Self:
        """See `PackedWeight`."""
        return cls.from_canonical(quantize(weight, 8, device))

    @staticmethod
    def represent(weight: torch.Tensor) -> torch.Tensor:
        """See `PackedWeight`."""
        return dequantize(quantize(weight, 8))

    @property
    def nbytes(self) -> int:
        """See `PackedWeight`."""
        return tensor_bytes(self.codes, self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `PackedWeight`."""

        def decode_rows(block: slice) -> torch.Tensor:
            return decode(self.codes[block], self.scale[block], None, 8)

        return linear_by_blocks(x, self.codes.shape[0], decode_rows)
