"""Kernels of 3, 4 and 8 bit that run wherever torch does: dequantize, then multiply."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from quant.backends.base import (
    CanonicalPacked,
    DecodeMemory,
    held_scales,
    linear_by_blocks,
    read_scales,
)
from quant.rounding.canonical import (
    CanonicalWeight,
    decode,
    pack_nibbles,
    pack_planes,
    unpack_nibbles,
    unpack_planes,
)


@dataclass(frozen=True)
class _TorchAffine(CanonicalPacked):
    """`packed` codes; `scales` as `held_scales`."""

    packed: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        return cls(cls._pack(canonical.codes), held_scales(canonical))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = DecodeMemory(x, len(self.scales))

        def decode_rows(block: slice) -> torch.Tensor:
            rows = block.stop - block.start
            codes = self._unpack(block, x.shape[-1], memory.codes[:rows])
            scale, zero = read_scales(self.scales[block])
            return decode(codes, scale, zero, self.bits, out=memory.values[:rows])

        return linear_by_blocks(x, len(self.scales), decode_rows)

    def restored_for(self, x: torch.Tensor) -> torch.Tensor:
        held = (self.packed, self.scales)
        there = type(self)(*(each.to(x.device, non_blocking=True) for each in held))
        out = there.packed.new_empty(len(self.scales), x.shape[-1])
        codes = there._unpack(slice(None), x.shape[-1], out)
        return decode(codes, *read_scales(there.scales), self.bits).to(x.dtype)

    @staticmethod
    @abstractmethod
    def _pack(codes: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _unpack(self, block: slice, columns: int, out: torch.Tensor) -> torch.Tensor:
        """Unpack uint8 codes `[rows of block, columns]`, to `out` if it likes."""


class Torch3Bit(_TorchAffine):
    """`packed`: uint8 `[3, out, ceil(in / 8)]`, planes of one bit."""

    bits: ClassVar[int] = 3
    _pack = staticmethod(pack_planes)

    def _unpack(self, block: slice, columns: int, out: torch.Tensor) -> torch.Tensor:
        return unpack_planes(self.packed[:, block], columns)


class Torch4Bit(_TorchAffine):
    """`packed`: uint8 `[out, ceil(in / 2)]`, two codes a byte."""

    bits: ClassVar[int] = 4
    _pack = staticmethod(pack_nibbles)

    def _unpack(self, block: slice, columns: int, out: torch.Tensor) -> torch.Tensor:
        return unpack_nibbles(self.packed[block], columns, out)


@dataclass(frozen=True)
class Torch8Bit(CanonicalPacked):
    """`codes`: int8 `[out, in]`; `scale`: float32 `[out, 1]`."""

    bits: ClassVar[int] = 8

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        return cls(canonical.codes, canonical.scale)

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
