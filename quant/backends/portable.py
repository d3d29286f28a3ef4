"""Kernels of 3 to 6 and 8 bit that run wherever torch does: dequantize, then multiply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from quant.backends.base import (
    CanonicalPacked,
    DecodeMemory,
    decode_held,
    held_scales,
    linear_by_blocks,
)
from quant.rounding.canonical import (
    CanonicalWeight,
    decode,
    pack_codes,
    unpack_codes,
)


@dataclass(frozen=True)
class _TorchAffine(CanonicalPacked):
    """`packed` as `pack_codes`; `scales` as `held_scales`."""

    packed: torch.Tensor
    scales: torch.Tensor
    in_features: int

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        packed = pack_codes(canonical.codes, cls.bits)
        return cls(packed, held_scales(canonical), canonical.codes.shape[1])

    def rows(self, which: torch.Tensor) -> torch.Tensor:
        codes = unpack_codes(self.packed[which], self.in_features, self.bits)
        return decode_held(codes, self.scales[which], self.bits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = DecodeMemory(x, len(self.scales))

        def decode_rows(block: slice) -> torch.Tensor:
            rows, columns = block.stop - block.start, x.shape[-1]
            codes = unpack_codes(self.packed[block], columns, self.bits, memory.codes[:rows])
            return decode_held(codes, self.scales[block], self.bits, memory.values[:rows])

        return linear_by_blocks(x, len(self.scales), decode_rows)

    def restored_for(self, x: torch.Tensor) -> torch.Tensor:
        packed, scales = (
            each.to(x.device, non_blocking=True) for each in (self.packed, self.scales)
        )
        codes = unpack_codes(packed, x.shape[-1], self.bits)
        return decode_held(codes, scales, self.bits).to(x.dtype)


class Torch3Bit(_TorchAffine):
    bits: ClassVar[int] = 3


class Torch4Bit(_TorchAffine):
    bits: ClassVar[int] = 4


class Torch5Bit(_TorchAffine):
    bits: ClassVar[int] = 5


class Torch6Bit(_TorchAffine):
    bits: ClassVar[int] = 6


@dataclass(frozen=True)
class Torch8Bit(CanonicalPacked):
    """`codes`: int8 `[out, in]`; `scale`: float32 `[out, 1]`."""

    bits: ClassVar[int] = 8

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        return cls(canonical.codes, canonical.scale)

    def rows(self, which: torch.Tensor) -> torch.Tensor:
        return decode(self.codes[which], self.scale[which], None, self.bits)

    def restored_for(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = (each.to(x.device, non_blocking=True) for each in (self.codes, self.scale))
        return decode(codes, scale, None, self.bits).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(self.codes)
        if x.dtype != torch.float16:  # codes are exact, and sums of them within the range
            return linear_by_blocks(x, rows, self.codes.__getitem__, self.scale.view(-1))
        memory = DecodeMemory(x, rows)

        def decode_rows(block: slice) -> torch.Tensor:
            codes = self.codes[block]
            return decode(codes, self.scale[block], None, 8, out=memory.values[: len(codes)])

        return linear_by_blocks(x, rows, decode_rows)
