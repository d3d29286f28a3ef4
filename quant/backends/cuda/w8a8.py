"""8 bit on GPUs that multiply 8-bit integers: weights and activations as codes.

What `quant.rounding.rotation` describes, in two launches: activations are rotated and rounded, then
multiplied. `RotatedCodes` computes the same on a CPU; codes and scales have the same bits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from quant.backends.base import CanonicalPacked
from quant.backends.cuda.driver import THREADS, Kernels, kernels_for
from quant.backends.table import LIBRARY_TOKENS
from quant.rounding.canonical import CanonicalWeight
from quant.rounding.rotation import RotatedCodes
from quant.rounding.ways import DEFAULT, Rounding

SOURCE = Path(__file__).with_name("w8a8.cu")

_TILES = {8: 16, 16: 16, 32: 32, 64: 32}
"""Rows of the weight that a block works on by its tokens."""

KERNELS = ("round_tokens", "scale_sums", *(f"multiply_{tokens}" for tokens in _TILES))

_RUN = 64
"""Columns that neighbouring lanes read together."""

_OCTET = 8

_BLOCKS = 4
"""Blocks a multiprocessor that splitting goes for; by registers it holds about as many at once."""

_KERNEL_TYPES = (torch.float16, torch.bfloat16)


class ProductShape(ctypes.Structure):
    """The struct `Shape` of the source."""

    _fields_ = tuple((name, ctypes.c_uint) for name in ("tokens", "rows", "runs", "splits"))


@dataclass(frozen=True)
class CodeProducts:
    """The compiled kernels; `blocks` keep the GPU busy. Where `has_library`, cuBLASLt multiplies
    more than `LIBRARY_TOKENS` tokens: its tiles are larger, and 4 bytes of sums for each output are
    little beside what so many tokens compute.
    """

    kernels: Kernels
    blocks: int
    has_library: bool

    def multiply(self, x: Tensor, weight: RotatedCodes, bias: Tensor | None = None) -> Tensor:
        """Multiply `x` `[tokens, in]` of the kernels' type; `bias` `[out]` of the same type."""
        tokens, (rows, columns) = len(x), weight.codes.shape
        out = x.new_empty(tokens, rows)
        by_library = self.has_library and tokens > LIBRARY_TOKENS and rows % _OCTET == 0
        at_once = next((most for most in _TILES if tokens <= most), max(_TILES))
        tiles = -(-rows // _TILES[at_once]) * -(-tokens // at_once)
        runs = columns // _RUN
        splits = 1 if by_library else max(1, min(-(-self.blocks // tiles), runs // 2))
        counted = tiles if splits > 1 else 0
        sums_of_splits = counted * splits * at_once * _TILES[at_once]
        counters = x.new_empty(counted + sums_of_splits, dtype=torch.int32)
        codes, scale = self.rounded(x, weight.factor, counters, counted)
        shape = ProductShape(tokens, rows, runs, splits)
        if by_library:
            sums = torch._int_mm(codes, weight.codes.t())
            blocks = -(-out.numel() // (_OCTET * THREADS))
            self.kernels.launch("scale_sums", blocks, sums, scale, weight.scale, bias, out, shape)
            return out
        self.kernels.launch(
            f"multiply_{at_once}", tiles * splits, codes, scale, weight.codes, weight.scale, bias,
            out, counters, counters[counted:], shape,
        )  # fmt: skip
        return out

    def rounded(
        self, x: Tensor, factor: Tensor, counters: Tensor, counted: int
    ) -> tuple[Tensor, Tensor]:
        """Round as `rotation.round_activations`, to int8 codes; so many `counters` become 0."""
        tokens, columns = x.shape
        codes = x.new_empty(tokens, columns, dtype=torch.int8)
        scale = x.new_empty(tokens, dtype=torch.float32)
        self.kernels.launch(
            "round_tokens", tokens, x, factor, codes, scale, columns, counters, counted
        )
        return codes, scale


@functools.cache
def code_products(dtype: torch.dtype, device: torch.device) -> CodeProducts:
    """Compile the kernels, once a process."""
    kernels = kernels_for(SOURCE, KERNELS, dtype, device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return CodeProducts(kernels, _BLOCKS * processors, _library_multiplies(device))


def _library_multiplies(device: torch.device) -> bool:
    """Whether cuBLASLt takes 8-bit codes on this GPU, which its version decides."""
    codes = torch.ones(32, _RUN, dtype=torch.int8, device=device)
    try:
        return bool((torch._int_mm(codes, codes.t()) == _RUN).all())
    except RuntimeError:
        return False


def _has_twin_alone(x: Tensor) -> bool:
    return x.device.type == "cpu" or x.dtype not in _KERNEL_TYPES


@dataclass(frozen=True, eq=False)
class CudaW8A8(RotatedCodes, CanonicalPacked):
    """Weights and activations of 8 bit, both rotated first."""

    bits: ClassVar[int] = 8
    rounds_again: ClassVar[bool] = True

    @classmethod
    def from_weight(
        cls, weight: Tensor, dtype: torch.dtype, device: torch.device, rounding: Rounding = DEFAULT
    ) -> Self:
        return cls.of_weight(weight, rounding, device)

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        return cls.of_canonical(canonical)

    @classmethod
    def represent(cls, weight: Tensor, rounding: Rounding = DEFAULT) -> Tensor:
        return cls.of_weight(weight, rounding).restored()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, None)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if _has_twin_alone(x):
            out = super().forward(x)
            return out if bias is None else out.add_(bias)
        return self.multiply(x, code_products(x.dtype, x.device), bias)

    def products(self, x: Tensor) -> Iterable[Tensor]:
        yield self.forward(x)
        if not _has_twin_alone(x):
            others = replace(code_products(x.dtype, x.device), blocks=1, has_library=False)
            yield self.multiply(x, others)

    def multiply(self, x: Tensor, products: CodeProducts, bias: Tensor | None = None) -> Tensor:
        rows, columns = self.codes.shape
        tokens = x.reshape(-1, columns).contiguous()
        if len(tokens) == 0:
            return x.new_empty(*x.shape[:-1], rows)
        own_bias = None if bias is None else bias.to(x.dtype)
        return products.multiply(tokens, self, own_bias).view(*x.shape[:-1], rows)
