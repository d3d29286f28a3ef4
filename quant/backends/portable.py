"""Kernels of 3, 4 and 8 bit that run wherever torch does: dequantize, then multiply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from quant.backends.base import CanonicalPacked, DecodeMemory, linear_by_blocks
from quant.rounding.canonical import (
    CanonicalWeight,
    decode,
    pack_nibbles,
    pack_planes,
    unpack_nibbles,
    unpack_planes,
)


@dataclass(frozen=True)
class Torch3Bit(CanonicalPacked):
    """`planes`: uint8 `[3, out, ceil(in / 8)]`; `scale`, `zero`: `[out, groups]`."""

    bits: ClassVar[int] = 3

    planes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        assert canonical.zero is not None, "3-bit codes are affine"
        zero = canonical.zero.to(canonical.scale.dtype)
        return cls(pack_planes(canonical.codes), canonical.scale, zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = DecodeMemory(x, self.scale.shape[0])

        def decode_rows(block: slice) -> torch.Tensor:
            codes = unpack_planes(self.planes[:, block], x.shape[-1])
            values = memory.values[: len(codes)]
            return decode(codes, self.scale[block], self.zero[block], 3, out=values)

        return linear_by_blocks(x, self.scale.shape[0], decode_rows)


@dataclass(frozen=True)
class Torch4Bit(CanonicalPacked):
    """`nibbles`: uint8 `[out, ceil(in / 2)]`; `scale`, `zero`: `[out, groups]`."""

    bits: ClassVar[int] = 4

    nibbles: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        assert canonical.zero is not None, "4-bit codes are affine"
        zero = canonical.zero.to(canonical.scale.dtype)
        return cls(pack_nibbles(canonical.codes), canonical.scale, zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = DecodeMemory(x, self.scale.shape[0])

        def decode_rows(block: slice) -> torch.Tensor:
            rows = block.stop - block.start
            codes = unpack_nibbles(self.nibbles[block], x.shape[-1], out=memory.codes[:rows])
            values = memory.values[: len(codes)]
            return decode(codes, self.scale[block], self.zero[block], 4, out=values)

        return linear_by_blocks(x, self.scale.shape[0], decode_rows)


@dataclass(frozen=True)
class Torch8Bit(CanonicalPacked):
    """`codes`: int8 `[out, in]`; `scale`: float32 `[out, 1]`."""

    bits: ClassVar[int] = 8

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        return cls(canonical.codes, canonical.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(self.codes)
        if x.dtype != torch.float16:  # codes are exact, and sums of them within the range
            return linear_by_blocks(x, rows, self.codes.__getitem__, self.scale.view(-1))
        memory = DecodeMemory(x, rows)

        def decode_rows(block: slice) -> torch.Tensor:
            codes = self.codes[block]
            return decode(codes, self.scale[block], None, 8, out=memory.values[: len(codes)])

        return linear_by_blocks(x, rows, decode_rows)
