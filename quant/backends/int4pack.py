"""4 bit on CPUs with torch's own int4 kernel; bfloat16 activations, 4.25 bits a weight.

The kernel's convention is the canonical one: `(code - 8) * scale + zero`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from quant.backends.base import CanonicalPacked, tensor_bytes
from quant.canonical import CanonicalWeight, row_blocks

_PACKED_ROWS = 64
"""Rows that the kernel interleaves (64 with AVX-512, fewer without), so that row ranges which are
multiples of it pack alone as they do within the whole."""


@dataclass(frozen=True)
class Int4Pack(CanonicalPacked):
    """`packed` `[out, in / 2]` uint8; `scale_zero` `[groups, out, 2]` bfloat16; `group` columns."""

    bits: ClassVar[int] = 4

    packed: torch.Tensor
    scale_zero: torch.Tensor
    group: int

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        """Pack 4-bit codes, a range of rows at a time as the kernel wants them in 32 bits each."""
        assert canonical.zero is not None, "4-bit codes are affine"
        codes = canonical.codes
        rows, columns = codes.shape
        packed = torch.empty(rows, columns // 2, dtype=torch.uint8)
        for block in row_blocks(rows, columns, codes.device, multiple=_PACKED_ROWS):
            wide = codes[block].to(torch.int32)
            packed[block] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(wide, 1)
        scale_zero = torch.stack((canonical.scale.t(), canonical.zero.t()), dim=-1)
        return cls(packed, scale_zero.contiguous(), canonical.group)

    @property
    def nbytes(self) -> int:
        """See `PackedWeight`."""
        return tensor_bytes(self.packed, self.scale_zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `PackedWeight`."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self.packed, self.group, self.scale_zero
        )
        return out.view(*x.shape[:-1], self.scale_zero.shape[1])
