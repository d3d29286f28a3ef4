"""8 bit on CPUs with torch's own int8 kernel: bfloat16 activations are multiplied as they are.

For CPUs whose 8-bit products saturate, and where activations must not be rounded to 8 bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from quant.backends.base import CanonicalPacked, linear_by_blocks, tensor_bytes
from quant.backends.table import INT8PACK_COLUMNS
from quant.canonical import CanonicalWeight
from quant.common.errors import SpecError

_MANY_TOKENS = 24
"""Number of tokens from which a product in bfloat16 is worth converting the codes (measured)."""


@dataclass(frozen=True)
class Int8Pack(CanonicalPacked):
    """An 8-bit weight. `codes`: int8 `[out, in]`; `scale`: float32 `[out]`."""

    bits: ClassVar[int] = 8

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        """Hold 8-bit codes as they are; SpecError for rows that the kernel would read beyond."""
        columns = canonical.codes.shape[1]
        if columns % INT8PACK_COLUMNS:
            raise SpecError(
                f"backend int8pack takes multiples of {INT8PACK_COLUMNS} input features, not "
                f"{columns}; torch_8bit takes any"
            )
        return cls(canonical.codes, canonical.scale.view(-1))

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.codes, self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1]).contiguous()
        rows = len(self.codes)
        if len(tokens) >= _MANY_TOKENS:
            return linear_by_blocks(x, rows, self.codes.__getitem__, self.scale)
        # The kernel takes scales in bfloat16, which would round them: multiply afterwards.
        sums = torch.ops.aten._weight_int8pack_mm(tokens, self.codes, tokens.new_ones(rows))
        out: torch.Tensor = sums.mul_(self.scale)
        return out.view(*x.shape[:-1], rows)
