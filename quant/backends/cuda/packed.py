"""3 to 6 and 8 bit on every GPU from compute capability 6.0, with llmpq's own kernels.

A few tokens are multiplied with the packed weight itself. For many, where a GPU's matrix units pay,
rows of the weight are restored to 16 bit a block at a time. On a CPU the same bytes are decoded in
torch, which is what the kernels are held against.

The order of codes in memory: eight consecutive columns, an octet, are `bits` bytes, column i at bit
`bits * i` of that little-endian number. 4-bit rows are their octets in turn. Four octets of 3, 5 or
6 bit are as many 32-bit words, and a row holds all first words, all second, and so on. 8-bit codes
are bytes.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch.nn import functional

from quant.backends.base import (
    CanonicalPacked,
    PackedWeight,
    decode_held,
    form_of,
    held_scales,
)
from quant.backends.cuda.products import (
    TENSOR,
    Codes,
    CudaProducts,
    has_tensor_cores,
    products_for,
)
from quant.common.errors import SpecError
from quant.devices import row_blocks
from quant.rounding.canonical import CanonicalWeight, decode
from quant.scheme import GROUP_SIZES, SUPER_BLOCK, ScaleForm, super_block_pairs

_OCTET = 8
_RUN = 32
"""Columns whose codes fill whole words."""
_NUMBER_BYTES = 8
"""Bytes of the number that an octet is packed and unpacked as."""


def pack_octets(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 `[out, in]`, `in` a multiple of 32, to uint8 `[out, in / 2]` at 4 bit and int32
    `[out, bits, in / 32]` at 3, 5 and 6 bit.
    """
    rows, columns = codes.shape
    in_octets = bits == _OCTET // 2
    shape = (rows, columns // 2) if in_octets else (rows, bits, columns // _RUN)
    out = codes.new_empty(shape, dtype=torch.uint8 if in_octets else torch.int32)
    shifts = _shifts(bits, codes.device)
    for block in row_blocks(rows, columns, codes.device):
        octets = codes[block].view(-1, columns // _OCTET, _OCTET).to(torch.int64)
        numbers = (octets << shifts).sum(-1)
        content = numbers.view(torch.uint8).view(-1, columns // _OCTET, _NUMBER_BYTES)[..., :bits]
        content = content.reshape(-1, columns // _OCTET * bits)
        if in_octets:
            out[block] = content
        else:
            words = content.view(torch.int32).view(-1, columns // _RUN, bits)
            out[block] = words.transpose(1, 2)
    return out


def unpack_octets(packed: torch.Tensor, bits: int) -> torch.Tensor:
    rows, content = packed.shape[0], packed
    if packed.dtype == torch.int32:
        content = packed.transpose(1, 2).contiguous().view(torch.uint8)
    octets = content.reshape(rows, -1, bits)
    numbers = torch.nn.functional.pad(octets, (0, _NUMBER_BYTES - bits)).view(torch.int64)
    codes = (numbers >> _shifts(bits, packed.device)).bitwise_and_((1 << bits) - 1)
    return codes.to(torch.uint8).view(rows, -1)


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, bits * _OCTET, bits, device=device)


_KERNEL_TYPES = (torch.float16, torch.bfloat16)

_TEST_SHAPE = (192, 4096)
_TEST_TOKENS = (3, 12, 29, 90)
"""Each of the kernels for tensor cores, with columns that are split."""
_TOLERANCE = 0.01
"""Largest relative error of the self-test; weights and outputs in bfloat16 cost 0.003."""


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
        if canonical.held is None and canonical.group not in GROUP_SIZES:
            raise SpecError(
                f"CUDA kernels take groups of {', '.join(map(str, GROUP_SIZES))} columns, not "
                f"{canonical.group}; use backend torch_{cls.bits}bit"
            )
        scales = held_scales(canonical, torch.bfloat16)
        return cls(pack_octets(canonical.codes, cls.bits), scales, columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x, None)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        kernels = self.kernels(x.dtype)
        if kernels is None:
            out = self._multiply_decoded(x)
            return out if bias is None else out.add_(bias)
        return kernels.multiply(self.codes, x, bias)

    def products(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        kernels = self.kernels(x.dtype)
        for way in (None,) if kernels is None else kernels.ways:
            yield self.forward(x) if kernels is None else kernels.multiply(self.codes, x, way=way)

    def warm_up(self, in_features: int, dtype: torch.dtype) -> None:
        kernels = self.kernels(dtype)
        if kernels is not None:
            kernels.warm_up(self.codes)

    @property
    def in_super_blocks(self) -> bool:
        return form_of(self.scales) is ScaleForm.SUPER_BLOCKS

    @property
    def codes(self) -> Codes:
        return Codes(self.packed, self.scales, self.in_features, self.bits)

    def kernels(self, dtype: torch.dtype) -> CudaProducts | None:
        """Give the kernels for activations of `dtype`; None where torch decodes the weight."""
        if self.packed.device.type == "cpu" or dtype not in _KERNEL_TYPES:
            return None
        return _products_for(type(self), self.in_super_blocks, dtype, self.packed.device)

    def rows(self, which: torch.Tensor) -> torch.Tensor:
        return self.decode_rows(which)

    def decode_rows(self, block: slice | torch.Tensor) -> torch.Tensor:
        codes, scales = self.packed[block], self.scales[block]
        if self.bits == 8:
            return decode(codes, scales, None, self.bits)
        return decode_held(unpack_octets(codes, self.bits), scales, self.bits)

    def _multiply_decoded(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.packed.shape[0]
        out = x.new_empty(*x.shape[:-1], rows)
        for block in row_blocks(rows, self.in_features, x.device):
            out[..., block] = functional.linear(x, self.decode_rows(block).to(x.dtype))
        return out


class Cuda3Bit(CudaPacked):
    """`packed`: int32 `[out, 3, in / 32]`; `scales` as `held_scales`, bfloat16 or narrow."""

    bits: ClassVar[int] = 3


class Cuda4Bit(CudaPacked):
    """`packed`: uint8 `[out, in / 2]`; `scales` as of 3 bit, or super-blocks."""

    bits: ClassVar[int] = 4


class Cuda5Bit(CudaPacked):
    """`packed`: int32 `[out, 5, in / 32]`; `scales` as of 4 bit."""

    bits: ClassVar[int] = 5


class Cuda6Bit(CudaPacked):
    """`packed`: int32 `[out, 6, in / 32]`; `scales` as of 4 bit."""

    bits: ClassVar[int] = 6


class Cuda8Bit(CudaPacked):
    """`packed`: int8 `[out, in]`; `scales`: float32 `[out, 1]`."""

    bits: ClassVar[int] = 8


@functools.cache
def _products_for(
    backend: type[CudaPacked], super_blocks: bool, dtype: torch.dtype, device: torch.device
) -> CudaProducts:
    """Compile the kernels; those for tensor cores are left out, with a warning, where they compute
    wrongly or cannot be had.
    """
    of_kernels = backend.bits, super_blocks, dtype, device
    if not has_tensor_cores(torch.cuda.get_device_capability(device), dtype):
        return products_for(*of_kernels, on_tensor_cores=False)
    try:
        products = products_for(*of_kernels, on_tensor_cores=True)
        complaint = tensor_cores_complaint(
            trial(backend, _TEST_SHAPE, super_blocks, device), products, dtype
        )
    except RuntimeError as error:
        complaint = str(error)
    if complaint is None:
        return products
    warnings.warn(
        f"products of {backend.bits}-bit weights do without tensor cores on {device}: {complaint}",
        RuntimeWarning,
        stacklevel=2,
    )
    return products_for(*of_kernels, on_tensor_cores=False)


def trial(
    backend: type[CudaPacked], shape: tuple[int, int], super_blocks: bool, device: torch.device
) -> CudaPacked:
    """A weight of random numbers, or of random codes and scales of super-blocks."""
    generator = torch.Generator().manual_seed(0)
    if not super_blocks:
        weight = torch.randn(shape, generator=generator)
        return backend.from_weight(weight, torch.float32, device)
    rows, columns = shape
    codes = torch.randint(1 << backend.bits, shape, generator=generator, dtype=torch.uint8)
    pairs = columns // SUPER_BLOCK * super_block_pairs(backend.bits)
    # below 32 two bytes are a number of float16 below 2^-7
    held = torch.randint(32, (rows, pairs, 2), generator=generator, dtype=torch.int8)
    return backend(pack_octets(codes, backend.bits).to(device), held.to(device), columns)


def asked_products(
    backend: type[PackedWeight], super_blocks: bool, dtype: torch.dtype, device: torch.device
) -> CudaProducts | None:
    """The kernels by which experts of `backend` are multiplied as they are asked; None where there
    are none, or they compute wrongly, which warns once.
    """
    if not issubclass(backend, CudaPacked):
        return None
    packed = trial(backend, (_TEST_EXPERTS * _EXPERT_ROWS, SUPER_BLOCK), super_blocks, device)
    products = packed.kernels(dtype)
    complaint = None if products is None else _asked_complaint(packed, products, dtype)
    if complaint is None:
        return products
    warnings.warn(
        f"{backend.bits}-bit experts are multiplied one after another on {device}: {complaint}",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


_TEST_EXPERTS, _EXPERT_ROWS = 5, 24


def _asked_complaint(packed: CudaPacked, products: CudaProducts, dtype: torch.dtype) -> str | None:
    generator, device = torch.Generator().manual_seed(0), packed.packed.device
    rows, columns = _EXPERT_ROWS, packed.in_features
    x = torch.randn(3, columns, generator=generator).to(device, dtype)
    asked = torch.tensor([[4, 0], [2, 4], [1, 2]], device=device)
    found = products.multiply_asked(packed.codes, rows, x, asked).float()
    each = packed.decode_rows(slice(None)).view(_TEST_EXPERTS, rows, columns).to(device)
    wanted = (each[asked.flatten()] @ x.float().repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1)
    error = float((found - wanted).norm() / wanted.norm())
    return None if error <= _TOLERANCE else f"a product is off by {error:.1%}"


def tensor_cores_complaint(
    packed: CudaPacked, products: CudaProducts, dtype: torch.dtype
) -> str | None:
    """Hold the kernels against the decoded weight; None: they are right."""
    generator, device = torch.Generator().manual_seed(0), packed.packed.device
    for tokens in _TEST_TOKENS:
        x = torch.randn(tokens, packed.in_features, generator=generator).to(device, dtype)
        wanted = packed.decode_rows(slice(None)).float() @ x.float().t()
        found = products.multiply(packed.codes, x, way=TENSOR).float().t()
        error = float((found - wanted).norm() / wanted.norm())
        if not error <= _TOLERANCE:
            return f"their product of {tokens} tokens is off by {error:.1%}"
    return None
