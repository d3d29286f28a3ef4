"""4 bit in pure torch: two codes a byte, decoded a few rows at a time; 4.25 bits a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from quant.backends.base import CanonicalPacked, DecodeMemory, linear_by_blocks, tensor_bytes
from quant.canonical import (
    CanonicalWeight,
    decode,
    pack_nibbles,
    unpack_nibbles,
)


@dataclass(frozen=True)
class Torch4Bit(CanonicalPacked):
    """A 4-bit weight. `nibbles`: uint8 `[out, ceil(in / 2)]`; `scale`, `zero`: `[out, groups]`."""

    bits: ClassVar[int] = 4

    nibbles: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        assert canonical.zero is not None, "4-bit codes are affine"
        zero = canonical.zero.to(canonical.scale.dtype)
        return cls(pack_nibbles(canonical.codes), canonical.scale, zero)

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.nibbles, self.scale, self.zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = DecodeMemory(x, self.scale.shape[0])

        def decode_rows(block: slice) -> torch.Tensor:
            rows = block.stop - block.start
            codes = unpack_nibbles(self.nibbles[block], x.shape[-1], out=memory.codes[:rows])
            values = memory.values[: len(codes)]
            return decode(codes, self.scale[block], self.zero[block], 4, out=values)

        return linear_by_blocks(x, self.scale.shape[0], decode_rows)
