"""Tensors between stages as plain bytes: Ray ships numpy arrays without copying, and numpy lacks
bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedTensor:
    """A tensor's bytes, dtype and shape to read them by; `ready_at_s` as in `MicroBatch`."""

    data: npt.NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]
    ready_at_s: float = 0.0


def pack(tensor: Tensor, ready_at_s: float = 0.0) -> PackedTensor:
    """`tensor` as bytes on the host (no copy where it lies there already)."""
    host = tensor.detach().cpu().contiguous()
    data: npt.NDArray[Any] = (
        host.view(torch.uint8).numpy() if host.numel() else np.empty(0, np.uint8)
    )
    dtype = str(host.dtype).removeprefix("torch.")
    return PackedTensor(data, dtype, tuple(host.shape), ready_at_s)


def unpack(packed: PackedTensor) -> Tensor:
    """The tensor that was packed, writable."""
    dtype: torch.dtype = getattr(torch, packed.dtype)
    return torch.from_numpy(packed.data.copy()).view(dtype).reshape(packed.shape)
