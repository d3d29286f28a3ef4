"""8 bit in pure torch: one code a byte, decoded a few rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from quant.backends.base import CanonicalPacked, linear_by_blocks, tensor_bytes
from quant.canonical import CanonicalWeight, decode


@dataclass(frozen=True)
class Torch8Bit(CanonicalPacked):
    """`codes` `[out, in]` int8; `scale` `[out, 1]` float32."""

    bits: ClassVar[int] = 8

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        """Hold 8-bit codes as they are."""
        return cls(canonical.codes, canonical.scale)

    @property
    def nbytes(self) -> int:
        """See `PackedWeight`."""
        return tensor_bytes(self.codes, self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `PackedWeight`."""

        def decode_rows(block: slice) -> torch.Tensor:
            return decode(self.codes[block], self.scale[block], None, 8)

        return linear_by_blocks(x, self.codes.shape[0], decode_rows)
