"""4 bit (nf4) on NVIDIA GPUs with bitsandbytes, which is optional."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from quant.backends.base import PackedWeight, copy_of, tensor_bytes
from quant.backends.sizes import NF4_BLOCK
from quant.common.errors import DeviceError
from quant.devices import row_blocks
from quant.rounding.ways import DEFAULT, Rounding
from quant.rounding.weighted import column_importance
from quant.scheme import LinearShape

_LEAST_VERSION = (0, 50)
"""The first with kernels for several rows (`quant.backends.table` has their costs)."""


_REMEDY = "pip install -U 'llmpq[bitsandbytes]'"


def _bitsandbytes() -> Any:
    try:
        found = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise DeviceError(
            "the 4-bit kernels of this GPU need bitsandbytes, which cannot be imported "
            f"({error}); {_REMEDY}"
        ) from error
    _check_version(found.__version__)
    return found


def check_bitsandbytes() -> str:
    """The version that is installed; DeviceError where none can be imported, or too old a one."""
    found: str = _bitsandbytes().__version__
    return found


@cache
def _check_version(version: str) -> None:
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _LEAST_VERSION:
        least = ".".join(map(str, _LEAST_VERSION))
        raise DeviceError(
            f"bitsandbytes is {version}; plans count on the 4-bit kernels of {least}: {_REMEDY}"
        )


@dataclass(frozen=True)
class BnbNf4(PackedWeight):
    """`packed` uint8 `[out * in / 2, 1]` in blocks of 64; `quantized`: maxima and values."""

    packed: Tensor
    quantized: Any

    @classmethod
    def from_weight(
        cls, weight: Tensor, dtype: torch.dtype, device: torch.device, rounding: Rounding = DEFAULT
    ) -> Self:
        values = copy_of(weight, dtype, device)
        packed, quantized = _bitsandbytes().functional.quantize_4bit(
            values, blocksize=NF4_BLOCK, quant_type="nf4", compress_statistics=False
        )
        if rounding.mode == "weighted":
            importance = column_importance(rounding.inputs, weight.shape[1])
            fit_maxima(values, importance, packed, quantized.absmax, quantized.code)
        return cls(packed, quantized)

    @classmethod
    def represent(cls, weight: Tensor, rounding: Rounding = DEFAULT) -> Tensor:
        packed = cls.from_weight(weight, torch.float32, weight.device, rounding)
        # bitsandbytes itself decodes blocks across rows wrongly on CPUs with AVX-512 (0.50)
        return decoded(packed.packed, packed.quantized.absmax, packed.quantized.code, weight.shape)

    def state(self) -> dict[str, Tensor]:
        return {
            "packed": self.packed,
            "maxima": self.quantized.absmax,
            "table": self.quantized.code,
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Tensor], shape: LinearShape, dtype: torch.dtype
    ) -> Self:
        quantized = _bitsandbytes().functional.QuantState(
            absmax=state["maxima"],
            shape=torch.Size((shape.out_features, shape.in_features)),
            code=state["table"],
            blocksize=NF4_BLOCK,
            quant_type="nf4",
            dtype=dtype,
        )
        return cls(state["packed"], quantized)

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.packed, self.quantized.absmax, self.quantized.code)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _bitsandbytes().matmul_4bit(x, self.packed.t(), self.quantized)
        return out


_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)
"""Shares of the maximum that the fit starts from."""

_ROUNDS = 3
"""Least squares after each start; further ones change less than 1 % of the error."""


def fit_maxima(
    weight: Tensor, importance: Tensor, packed: Tensor, maxima: Tensor, table: Tensor
) -> None:
    """Replace what bitsandbytes has chosen for `weight` `[out, in]`, columns weighed by
    `importance` float32 `[in]`. `packed` uint8 `[out * in / 2, 1]`, the first code high; `maxima`
    float32 `[blocks]`; `table` float32 `[16]`, ascending. A shorter last block stays as it is.

    A weight is a value of the table, from -1 to 1, times the block's maximum. Any positive number
    may stand as this maximum: where it is below that of the weights, the largest are cut. As in
    `quant.rounding.weighted`, the fit alternates between nearest values and least squares, from
    several shares of the true maximum, and keeps the best.
    """
    whole = weight.numel() // NF4_BLOCK
    blocks = weight.reshape(-1)[: whole * NF4_BLOCK].view(whole, NF4_BLOCK)
    codes_at = packed.view(-1)[: whole * NF4_BLOCK // 2].view(whole, -1)
    columns = weight.shape[1]
    importance = importance.to(weight.device)
    inside = torch.arange(NF4_BLOCK, device=weight.device)
    for own in row_blocks(whole, NF4_BLOCK, weight.device):
        first = torch.arange(own.start, own.stop, device=weight.device) * NF4_BLOCK
        weights = importance[(first.unsqueeze(-1) + inside).remainder_(columns)]
        values = blocks[own].float()
        best = _best_maxima(values, weights, maxima[own], table)
        codes = _codes(values, best, table).to(torch.uint8)
        maxima[own] = best
        codes_at[own] = (codes[:, ::2] << 4) | codes[:, 1::2]


def decoded(packed: Tensor, maxima: Tensor, table: Tensor, shape: torch.Size) -> Tensor:
    codes = torch.stack((packed.view(-1) >> 4, packed.view(-1) & 15), -1).view(-1)
    blocks = maxima.repeat_interleave(NF4_BLOCK)[: shape.numel()]
    return (table[codes[: shape.numel()].int()] * blocks).view(shape)


def _best_maxima(values: Tensor, importance: Tensor, maxima: Tensor, table: Tensor) -> Tensor:
    best, least = maxima, _error(values, importance, maxima, table)
    for share in _SHARES:
        maximum = maxima * share
        for _ in range(_ROUNDS):
            nearest = table[_codes(values, maximum, table)]
            weighted = nearest * importance
            square = (weighted * nearest).sum(-1)
            slope = (weighted * values).sum(-1)
            maximum = torch.where((square > 0) & (slope > 0), slope / square, maximum)
            error = _error(values, importance, maximum, table)
            better = error < least
            best, least = torch.where(better, maximum, best), torch.where(better, error, least)
    return best


def _error(values: Tensor, importance: Tensor, maxima: Tensor, table: Tensor) -> Tensor:
    restored = table[_codes(values, maxima, table)] * maxima.unsqueeze(-1)
    return restored.sub_(values).square_().mul_(importance).sum(-1)


def _codes(values: Tensor, maxima: Tensor, table: Tensor) -> Tensor:
    middles = (table[1:] + table[:-1]) / 2
    return torch.bucketize(values / maxima.clamp(min=1e-38).unsqueeze(-1), middles)
