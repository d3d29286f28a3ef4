"""8 bit in pure torch: one code a byte, decoded a few rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from quant.backends.base import CanonicalPacked, DecodeMemory, linear_by_blocks, tensor_bytes
from quant.canonical import CanonicalWeight, decode


@dataclass(frozen=True)
class Torch8Bit(CanonicalPacked):
    """An 8-bit weight. `codes`: int8 `[out, in]`; `scale`: float32 `[out, 1]`."""

    bits: ClassVar[int] = 8

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        """Hold 8-bit codes as they are."""
        return cls(canonical.codes, canonical.scale)

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.codes, self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(self.codes)
        if x.dtype != torch.float16:  # codes are exact, and sums of them within the range
            return linear_by_blocks(x, rows, self.codes.__getitem__, self.scale.view(-1))
        memory = DecodeMemory(x, rows)

        def decode_rows(block: slice) -> torch.Tensor:
            codes = self.codes[block]
            return decode(codes, self.scale[block], None, 8, out=memory.values[: len(codes)])

        return linear_by_blocks(x, rows, decode_rows)
