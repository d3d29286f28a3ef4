"""The interface of kernel backends, and code that several of them use."""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from quant import super_blocks
from quant.common.errors import CheckpointError
from quant.devices import moved_blocks, prefers_float32, ranges, row_blocks, rows_at_once
from quant.narrow import decode_scales, encode
from quant.rounding.canonical import CanonicalWeight, decode, dequantize, quantize
from quant.rounding.ways import DEFAULT, Rounding
from quant.scheme import LinearShape, ScaleForm

_MANY_TOKENS = 8
_PRODUCT_ROWS = 256
"""For so many tokens, products of fewer rows are slower than decoding into a cache gains."""


class PackedWeight(ABC):
    """One weight `[out, in]` as a backend of `quant.backends.table` holds it: a dataclass of
    tensors and numbers, by which it is stored. Its host looks at no input in `forward`, which CUDA
    graphs hold.
    """

    @classmethod
    @abstractmethod
    def from_weight(
        cls, weight: Tensor, dtype: torch.dtype, device: torch.device, rounding: Rounding = DEFAULT
    ) -> Self: ...

    @classmethod
    @abstractmethod
    def represent(cls, weight: Tensor, rounding: Rounding = DEFAULT) -> Tensor:
        """Return the float weight `[out, in]` that `from_weight` of `weight` stands for."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Add `bias` `[out]`, where a kernel can within its launch."""
        out = self.forward(x)
        return out if bias is None else out.add_(bias)

    def restored_for(self, x: Tensor) -> Tensor | None:
        """Give the weight `[out, in]` for inputs `x` `[..., in]`, to whose device its parts are
        copied first; None for layouts that only this kernel knows.
        """
        return None

    def rows(self, which: Tensor) -> Tensor | None:
        """Decode the rows `which` `[n]`, int64, to float32 `[n, in]`, as an embedding looks them
        up; None for layouts that only this kernel knows.
        """
        return None

    def products(self, x: Tensor) -> Iterable[Tensor]:
        """Give the product in every way that `forward` may choose, for self-tests."""
        return (self.forward(x),)

    def warm_up(self, in_features: int, dtype: torch.dtype) -> None:  # noqa: B027  (most need none)
        """Compile and time what the first product of `dtype` would wait for."""

    @property
    def nbytes(self) -> int:
        return tensor_bytes(*(held for held in self._held.values() if torch.is_tensor(held)))

    def state(self) -> dict[str, Tensor]:
        """Give tensors from which `from_state` restores this weight; numbers are int64 without
        dimensions.
        """
        return {name: torch.as_tensor(held) for name, held in self._held.items()}

    @classmethod
    def from_state(
        cls, state: Mapping[str, Tensor], shape: LinearShape, dtype: torch.dtype
    ) -> Self:
        numbers = {field.name for field in _fields(cls) if field.type in (int, "int")}
        return cls(**{n: int(value) if n in numbers else value for n, value in state.items()})

    @property
    def _held(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in _fields(self)}


def _fields(packed: Any) -> Any:
    return fields(packed)


class CanonicalPacked(PackedWeight):
    """Packs codes of its `bits`; `rounds_again`: rounded once more, to codes of its own."""

    bits: ClassVar[int]
    rounds_again: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self: ...

    @classmethod
    def from_weight(
        cls, weight: Tensor, dtype: torch.dtype, device: torch.device, rounding: Rounding = DEFAULT
    ) -> Self:
        return cls.from_canonical(quantize(weight, cls.bits, device, rounding))

    @classmethod
    def represent(cls, weight: Tensor, rounding: Rounding = DEFAULT) -> Tensor:
        return dequantize(quantize(weight, cls.bits, rounding=rounding))


def held_scales(canonical: CanonicalWeight, dtype: torch.dtype | None = None) -> Tensor:
    """Scales and zeros of affine codes as backends hold them: uint8 `[out, 1 + groups, 2]`
    (`quant.narrow`), int8 `[out, pairs, 2]` (`quant.super_blocks`), else `[out, groups, 2]` in
    `dtype`, without one as they are.
    """
    assert canonical.zero is not None, "asked of affine codes"
    if canonical.held is not None:
        return canonical.held.contiguous()
    if canonical.narrow:
        return encode(canonical.scale, canonical.zero, canonical.bits)
    dtype = dtype or canonical.scale.dtype
    return torch.stack((canonical.scale.to(dtype), canonical.zero.to(dtype)), dim=-1)


def read_scales(held: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and zeros `[out, groups]` of what `held_scales` gave, but of super-blocks."""
    assert form_of(held) is not ScaleForm.SUPER_BLOCKS, "whose zeros would be rounded"
    if held.dtype == torch.uint8:
        return decode_scales(held, bits)
    scale, zero = held.unbind(-1)
    return scale, zero


def form_of(held: Tensor) -> ScaleForm:
    """The form of scales that backends hold, which their type tells."""
    forms = {torch.uint8: ScaleForm.NARROW, torch.int8: ScaleForm.SUPER_BLOCKS}
    return forms.get(held.dtype, ScaleForm.PAIRS)


def decode_held(codes: Tensor, held: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Decode `[rows, in]` with scales that `held_scales` gave to float32, each weight rounded at
    most once.
    """
    form = form_of(held)
    if form is ScaleForm.SUPER_BLOCKS:
        scale, low = super_blocks.decode_scales(held, bits)
    else:
        scale, low = read_scales(held, bits)
        if form is ScaleForm.NARROW:  # each step is exact in float32
            low.sub_(scale, alpha=1 << (bits - 1))
    return decode(codes, scale, low, bits, out, from_lowest=form is not ScaleForm.PAIRS)


def groups_of(held: Tensor) -> int:
    return held.shape[1] - (held.dtype == torch.uint8)


def copy_of(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy, in row blocks cast on `device` (the host's memory would hold a whole copy);
    CheckpointError for NaN, and for values infinite in `dtype`.
    """
    out = torch.empty(tensor.shape, dtype=dtype, device=device)
    source, target = torch.atleast_1d(tensor), torch.atleast_1d(out)
    rows = len(target)
    blocks = row_blocks(rows, target.numel() // max(1, rows), device)
    for block, part in moved_blocks(source, blocks, device):
        filled = target[block].copy_(part)
        if filled.numel() and dtype.is_floating_point and not _is_finite(filled):
            raise CheckpointError(
                f"a tensor of shape {list(tensor.shape)} holds NaN or values that are infinite in "
                f"{dtype}; the checkpoint is damaged or needs another compute type"
            )
    return out


def _is_finite(values: Tensor) -> bool:
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def tensor_bytes(*tensors: Tensor) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def content_of(packed: Tensor) -> Tensor:
    """The bytes of a weight that oneDNN has laid out, uint8, where they lie."""
    address, size = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def linear_by_blocks(
    x: Tensor,
    rows: int,
    decode_rows: Callable[[slice], Tensor],
    row_scale: Tensor | None = None,
) -> Tensor:
    """Multiply `x` `[..., in]` with a weight of `rows` rows that `decode_rows` gives `[block, in]`,
    at most `rows_at_once` of them, in the same memory if it likes. Sums are multiplied by
    `row_scale` `[rows]`.
    """
    tokens = x.reshape(-1, x.shape[-1])
    compute = torch.float32 if prefers_float32(x.dtype, x.device, len(tokens)) else x.dtype
    tokens = tokens.to(compute)
    step = rows_at_once(x.shape[-1], x.device)
    few = compute == torch.float32 and len(tokens) < _MANY_TOKENS
    together = step if few else step * -(-_PRODUCT_ROWS // step)
    weight = tokens.new_empty(min(together, rows), x.shape[-1])
    out = x.new_empty(len(tokens), rows)
    for block in ranges(rows, together):
        own = _filled(weight[: block.stop - block.start], step, block.start, decode_rows)
        sums = functional.linear(tokens, own)
        out[:, block] = sums if row_scale is None else sums * row_scale[block]
    return out.view(*x.shape[:-1], rows)


def _filled(
    weight: Tensor, step: int, first: int, decode_rows: Callable[[slice], Tensor]
) -> Tensor:
    for part in ranges(len(weight), step):
        decoded = decode_rows(slice(first + part.start, first + part.stop))
        if decoded.shape == weight.shape and decoded.dtype == weight.dtype:
            return decoded
        weight[part] = decoded
    return weight


class ThreadWords(threading.local):
    """Memory of one thread for what it restores, kept: fresh pages take as long as restoring."""

    def __init__(self) -> None:
        self._words = torch.empty(0, dtype=torch.int32)

    def words(self, count: int) -> Tensor:
        """So many numbers of int32, of any content."""
        if count > len(self._words):
            with torch.inference_mode(False):  # or it could be written in inference alone
                self._words = torch.empty(count, dtype=torch.int32)
        return self._words[:count]


class DecodeMemory:
    """Memory that `linear_by_blocks` decodes to again, as fresh pages take longer: `codes` uint8
    and `values` float32 `[rows_at_once, in]`.
    """

    def __init__(self, x: Tensor, rows: int) -> None:
        shape = (min(rows_at_once(x.shape[-1], x.device), rows), x.shape[-1])
        self.codes = torch.empty(shape, dtype=torch.uint8, device=x.device)
        self.values = torch.empty(shape, device=x.device)
