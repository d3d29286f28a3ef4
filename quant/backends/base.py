"""What a kernel backend offers, and what the backends share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol, Self

import torch
from torch.nn import functional

from quant.canonical import CanonicalWeight, dequantize, quantize, row_blocks
from quant.errors import CheckpointError


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


class CanonicalPacked(ABC):
    """A backend that packs the canonical form at its own `bits`: quantizing is not its business."""

    bits: ClassVar[int]

    @classmethod
    @abstractmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        """Pack codes of `bits` bits."""

    @classmethod
    def from_weight(cls, weight: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Self:
        """See `PackedWeight`."""
        return cls.from_canonical(quantize(weight, cls.bits, device))

    @classmethod
    def represent(cls, weight: torch.Tensor) -> torch.Tensor:
        """See `PackedWeight`."""
        return dequantize(quantize(weight, cls.bits))


def copy_of(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of its own, no view of a checkpoint file, whose float values are all finite.

    Copied in blocks of rows, each cast on `device`: a copy of the whole to a GPU would be cast in
    host memory first. CheckpointError for NaN, and for values that are infinite in `dtype`.
    """
    out = torch.empty(tensor.shape, dtype=dtype, device=device)
    source, target = torch.atleast_1d(tensor), torch.atleast_1d(out)
    rows = len(target)
    for block in row_blocks(rows, target.numel() // max(1, rows), device):
        filled = target[block].copy_(source[block].to(device))
        if filled.numel() and dtype.is_floating_point and not _is_finite(filled):
            raise CheckpointError(
                f"a tensor of shape {list(tensor.shape)} holds NaN or values that are infinite in "
                f"{dtype}; the checkpoint is damaged or needs another compute type"
            )
    return out


def _is_finite(values: torch.Tensor) -> bool:
    """Without a temporary: NaN and infinity pass through the extremes."""
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


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
