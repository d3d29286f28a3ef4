"""What a kernel backend offers, and what the backends share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

import torch
from torch.nn import functional

from quant.canonical import row_blocks


class PackedWeight(Protocol):
    """One weight `[out, in]` as a backend holds it; its rules are in `quant.scheme`."""

    @classmethod
    def from_weight(cls, weight: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Self:
        """Pack `weight` `[out, in]` for activations of `dtype` on `device`."""
        ...

    @staticmethod
    def represent(weight: torch.Tensor) -> torch.Tensor:
        """The float32 weight `[out, in]` that the backend makes of `weight`, on its device."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held."""
        ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[..., in]` times the transposed weight: `[..., out]` in the type of `x`."""
        ...


def tensor_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of the tensors' storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def linear_by_blocks(
    x: torch.Tensor, rows: int, decode_rows: Callable[[slice], torch.Tensor]
) -> torch.Tensor:
    """`x` `[..., in]` times a weight of `rows` rows that is decoded a few rows at a time.

    `decode_rows` gives the float32 weight `[block, in]` of a half-open range of rows.
    """
    out = x.new_empty(*x.shape[:-1], rows)
    for block in row_blocks(rows, x.shape[-1], x.device):
        out[..., block] = functional.linear(x, decode_rows(block).to(x.dtype))
    return out
