"""4 bit on CPUs with torch's own int4 kernel; bfloat16 activations, 4.25 bits a weight.

The kernel's convention is the canonical one: `(code - 8) * scale + zero`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from quant.backends.base import CanonicalPacked, tensor_bytes
from quant.backends.cpu.int4_layout import (
    BLOCK_ROWS,
    is_many,
    multiply_few,
    multiply_many,
    pack_codes,
    pack_scale_zero,
)
from quant.canonical import CanonicalWeight, row_blocks


@dataclass(frozen=True)
class Int4Pack(CanonicalPacked):
    """A 4-bit weight. `packed`: uint8 `[out, in / 2]`; `scale_zero`: bfloat16 `[groups, out,
    2]`.
    """

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
        for block in row_blocks(rows, columns, codes.device, multiple=BLOCK_ROWS):
            packed[block] = pack_codes(codes[block])
        return cls(packed, pack_scale_zero(canonical.scale, canonical.zero), canonical.group)

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.packed, self.scale_zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1]).contiguous()
        if is_many(tokens):
            out = multiply_many(tokens, self.packed.__getitem__, self.group, self.scale_zero)
        else:
            out = multiply_few(tokens, self.packed, self.group, self.scale_zero)
        return out.view(*x.shape[:-1], self.scale_zero.shape[1])
