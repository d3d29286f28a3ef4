"""3 bit in pure torch: three planes of bits, decoded a few rows at a time; 3.25 bits a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from quant.backends.base import CanonicalPacked, DecodeMemory, linear_by_blocks, tensor_bytes
from quant.canonical import (
    CanonicalWeight,
    decode,
    pack_planes,
    unpack_planes,
)


@dataclass(frozen=True)
class Torch3Bit(CanonicalPacked):
    """A 3-bit weight. `planes`: uint8 `[3, out, ceil(in / 8)]`; `scale`, `zero`: `[out,
    groups]`.
    """

    bits: ClassVar[int] = 3

    planes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        assert canonical.zero is not None, "3-bit codes are affine"
        zero = canonical.zero.to(canonical.scale.dtype)
        return cls(pack_planes(canonical.codes), canonical.scale, zero)

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.planes, self.scale, self.zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = DecodeMemory(x, self.scale.shape[0])

        def decode_rows(block: slice) -> torch.Tensor:
            codes = unpack_planes(self.planes[:, block], x.shape[-1])
            values = memory.values[: len(codes)]
            return decode(codes, self.scale[block], self.zero[block], 3, out=values)

        return linear_by_blocks(x, self.scale.shape[0], decode_rows)
