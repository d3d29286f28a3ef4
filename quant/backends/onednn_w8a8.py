"""8 bit on CPUs with VNNI: oneDNN multiplies int8 weights with activations rounded per token.

Activations become uint8 around 128 with a scale per token: all tokens then share a zero, which is
what oneDNN takes, and the scale of a token is multiplied in afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from quant.backends.base import CanonicalPacked, tensor_bytes
from quant.canonical import CanonicalWeight

_LIMIT = 127
_MIDDLE = 128


@dataclass(frozen=True)
class OneDnnW8A8(CanonicalPacked):
    """`packed`: oneDNN's own layout of `[in, out]`; `scale` `[out]` float32; `zero` `[1]` int32."""

    bits: ClassVar[int] = 8

    packed: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        """Pack 8-bit codes."""
        packed = torch.ops.onednn.qlinear_prepack(canonical.codes, None)
        return cls(packed, canonical.scale.view(-1), torch.zeros(1, dtype=torch.int32))

    @property
    def nbytes(self) -> int:
        """See `PackedWeight`; the packed layout has padding and compensation that torch counts."""
        packed_bytes: int = torch.ops.mkldnn._nbytes(self.packed)
        return packed_bytes + tensor_bytes(self.scale, self.zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `PackedWeight`."""
        codes, scale = _quantize_tokens(x.reshape(-1, x.shape[-1]))
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, _MIDDLE, self.packed, self.scale, self.zero, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return out.mul_(scale).to(x.dtype).view(*x.shape[:-1], self.scale.numel())


def _quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 `[tokens, in]` and scales float32 `[tokens, 1]` of `x` `[tokens, in]`."""
    values = x.to(torch.float32, copy=True)
    scale = values.abs().amax(-1, keepdim=True).div_(_LIMIT)
    scale.masked_fill_(scale == 0, 1.0)
    return values.div_(scale).round_().add_(_MIDDLE).to(torch.uint8), scale
