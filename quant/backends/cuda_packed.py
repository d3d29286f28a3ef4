"""3, 4 and 8 bit on every GPU from compute capability 6.0, with llmpq's own kernels.

A few tokens are multiplied with the packed weight itself. For many, where a GPU's matrix units pay,
rows of the weight are restored to 16 bit a block at a time. On a CPU the same bytes are decoded in
torch, which is what the kernels are held against.

The order of codes in memory: eight consecutive columns, an octet, are `bits` bytes, column i at bit
`bits * i` of that little-endian number. 4-bit rows are their octets in turn. Four 3-bit octets are
three 32-bit words, and a row holds all first words, all second, all third. 8-bit codes are bytes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch.nn import functional

from quant.backends.base import CanonicalPacked
from quant.backends.cuda_driver import THREADS, Kernels, kernels_for
from quant.backends.table import FUSED_TOKENS
from quant.common.errors import SpecError
from quant.rounding.canonical import CanonicalWeight, dequantize, row_blocks
from quant.scheme import GROUP_SIZES

SOURCE = Path(__file__).with_name("cuda_kernels.cu")
KERNELS = ("one_token", "four_tokens", "eight_tokens", "restore")

_OCTET = 8
_RUN = 32
"""Columns whose 3-bit codes fill three whole words."""


def pack_octets(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 `[out, in]`, `in` a multiple of 32, to uint8 `[out, in / 2]` at 4 bit and int32
    `[out, 3, in / 32]` at 3 bit.
    """
    rows, columns = codes.shape
    shape = (rows, 3, columns // _RUN) if bits == 3 else (rows, columns // 2)
    out = codes.new_empty(shape, dtype=torch.int32 if bits == 3 else torch.uint8)
    shifts = _shifts(bits, codes.device)
    for block in row_blocks(rows, columns, codes.device):
        octets = codes[block].view(-1, columns // _OCTET, _OCTET).to(torch.int32)
        numbers = (octets << shifts).sum(-1, dtype=torch.int32)
        content = numbers.view(torch.uint8).view(-1, columns // _OCTET, 4)[..., :bits]
        content = content.reshape(-1, columns // _OCTET * bits)
        if bits == 3:
            out[block] = content.view(torch.int32).view(-1, columns // _RUN, 3).transpose(1, 2)
        else:
            out[block] = content
    return out


def unpack_octets(packed: torch.Tensor, bits: int) -> torch.Tensor:
    rows = packed.shape[0]
    if bits == 3:
        content = packed.transpose(1, 2).contiguous().view(torch.uint8).view(rows, -1, 3)
        content = torch.nn.functional.pad(content, (0, 1))
    else:
        content = packed.contiguous()
    numbers = content.view(torch.int32).view(rows, -1, 1)
    codes = (numbers >> _shifts(bits, packed.device)).bitwise_and_((1 << bits) - 1)
    return codes.to(torch.uint8).view(rows, -1)


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, bits * _OCTET, bits, dtype=torch.int32, device=device)


_BLOCK_ROWS = 8
"""Rows of the weight that a block of threads works on, in all kernels that multiply."""
_ALIGNMENT = 16
_KERNEL_TYPES = (torch.float16, torch.bfloat16)


class Width(ctypes.Structure):
    """The struct `Width` of the source: octets and groups of a row, log2 of a group's octets."""

    _fields_ = (
        ("octets", ctypes.c_uint),
        ("groups", ctypes.c_uint),
        ("group_shift", ctypes.c_uint),
    )


@dataclass(frozen=True)
class CudaPacked(CanonicalPacked):
    packed: torch.Tensor
    scales: torch.Tensor
    in_features: int

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        columns = canonical.codes.shape[1]
        if canonical.zero is None:
            return cls(canonical.codes, canonical.scale, columns)
        if canonical.group not in GROUP_SIZES:
            raise SpecError(
                f"CUDA kernels take groups of {', '.join(map(str, GROUP_SIZES))} columns, not "
                f"{canonical.group}; use backend torch_{cls.bits}bit"
            )
        parameters = (canonical.scale.bfloat16(), canonical.zero.bfloat16())
        return cls(pack_octets(canonical.codes, cls.bits), torch.stack(parameters, dim=-1), columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu" or x.dtype not in _KERNEL_TYPES:
            return self._multiply_decoded(x)
        return self.multiply(x, kernels_for(SOURCE, KERNELS, x.dtype, x.device, BITS=self.bits))

    def multiply(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        tokens = x.reshape(-1, self.in_features).contiguous()
        if tokens.data_ptr() % _ALIGNMENT:
            tokens = tokens.clone()
        out = tokens.new_empty(len(tokens), self.packed.shape[0])
        if len(tokens) > FUSED_TOKENS:
            self._multiply_restored(tokens, out, kernels)
        elif len(tokens) > 0:
            self._multiply_packed(tokens, out, kernels)
        return out.view(*x.shape[:-1], self.packed.shape[0])

    def decode_rows(self, block: slice) -> torch.Tensor:
        codes, scale, zero = self.packed[block], self.scales[block], None
        if self.bits != 8:
            codes = unpack_octets(codes, self.bits)
            scale, zero = scale.unbind(-1)
        group = self.in_features // scale.shape[1]
        return dequantize(CanonicalWeight(codes, scale, zero, self.bits, group))

    def _multiply_decoded(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.packed.shape[0]
        out = x.new_empty(*x.shape[:-1], rows)
        for block in row_blocks(rows, self.in_features, x.device):
            out[..., block] = functional.linear(x, self.decode_rows(block).to(x.dtype))
        return out

    def _multiply_packed(self, x: torch.Tensor, out: torch.Tensor, kernels: Kernels) -> None:
        tokens, rows = out.shape
        name, at_once = _kernel_for(tokens)
        blocks = -(-rows // _BLOCK_ROWS) * -(-tokens // at_once)
        kernels.launch(name, blocks, x, self.packed, self.scales, out, tokens, rows, self._width())

    def _multiply_restored(self, x: torch.Tensor, out: torch.Tensor, kernels: Kernels) -> None:
        blocks = list(row_blocks(out.shape[1], self.in_features, x.device))
        scratch = x.new_empty(blocks[0].stop, self.in_features)
        for block in blocks:
            weight = scratch[: block.stop - block.start]
            grid = -(-weight.numel() // (_OCTET * THREADS))
            rows = (block.start, len(weight))
            kernels.launch("restore", grid, self.packed, self.scales, weight, *rows, self._width())
            torch.mm(x, weight.t(), out=out[:, block])

    def _width(self) -> Width:
        groups = self.scales.shape[1]
        octets = self.in_features // _OCTET
        return Width(octets, groups, (octets // groups).bit_length() - 1)


class Cuda3Bit(CudaPacked):
    """`packed`: int32 `[out, 3, in / 32]`; `scales`: bfloat16 `[out, groups, 2]`."""

    bits: ClassVar[int] = 3


class Cuda4Bit(CudaPacked):
    """`packed`: uint8 `[out, in / 2]`; `scales`: bfloat16 `[out, groups, 2]`."""

    bits: ClassVar[int] = 4


class Cuda8Bit(CudaPacked):
    """`packed`: int8 `[out, in]`; `scales`: float32 `[out, 1]`."""

    bits: ClassVar[int] = 8


def _kernel_for(tokens: int) -> tuple[str, int]:
    """Name the kernel and its tokens a block; two tokens read the weight twice, the second time
    from cache: still fewer instructions than the kernel for four.
    """
    if tokens <= 2:
        return "one_token", 1
    return ("four_tokens", 4) if tokens <= 4 else ("eight_tokens", 8)
