"""The canonical form of a quantized weight: integer codes with a scale and a zero per group.

Round-to-nearest, no calibration (LLM-PQ section 2.3). 3 and 4 bit are affine per group of a row,
8 bit is symmetric per row:

    weight ~ (code - 2^(bits-1)) * scale + zero     3 and 4 bit, codes 0 .. 2^bits - 1
    weight ~ code * scale                           8 bit, codes -127 .. 127

Scale and zero of 3 and 4 bit are bfloat16, the only type that torch's int4pack kernel takes with
bfloat16 activations; it neither overflows nor underflows where a weight does not. They are rounded
*before* the codes are chosen, the scale upwards, so that every weight is within half a scale of its
code whatever the rounding did to the zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quant.errors import CheckpointError, SpecError
from quant.scheme import group_size

CANONICAL_BITS = (3, 4, 8)

_INT8_LIMIT = 127
_LOWEST_BITS = 0x0101010101010101
"""The lowest bit of each byte of a 64-bit word."""

_BLOCK_WEIGHTS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Weights worked on at once: 2 MB of float32 stays in a CPU core's cache (16 MB took 1.6 times as
long on an AVX-512 core), 64 MB keeps a GPU busy."""


@dataclass(frozen=True)
class CanonicalWeight:
    """A weight `[out, in]` as codes; see the module's header for what they mean.

    `codes`: uint8 (3 and 4 bit) or int8 (8 bit) `[out, in]`. `scale`: bfloat16 `[out, groups]` or,
    at 8 bit, float32 `[out, 1]`. `zero`: bfloat16 `[out, groups]`, None at 8 bit. `group`: columns
    that share a scale; it divides `in`.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    bits: int
    group: int


def quantize(
    weight: torch.Tensor, bits: int, device: torch.device | None = None
) -> CanonicalWeight:
    """Round `weight` `[out, in]` (any float type) to the canonical form, on `device`.

    Works through blocks of rows, so that temporaries stay at a few megabytes next to the codes.
    SpecError for other bitwidths than 3, 4 and 8; CheckpointError for weights that are not finite.
    """
    if bits not in CANONICAL_BITS:
        raise SpecError(f"cannot quantize to {bits} bits; choose one of 3, 4 and 8")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise CheckpointError(
            f"cannot quantize a {weight.dtype} tensor of shape {list(weight.shape)}: "
            "a float matrix is needed (is the checkpoint quantized already?)"
        )
    rows, columns = weight.shape
    group = columns if bits == 8 else group_size(columns)
    result = _empty(rows, columns, group, bits, device or weight.device)
    for block in row_blocks(rows, columns, result.codes.device):
        _quantize_block(weight[block], result, block)
    return result


def dequantize(canonical: CanonicalWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight `[out, in]` that the codes stand for."""
    rows, columns = canonical.codes.shape
    out = torch.empty(rows, columns, dtype=dtype, device=canonical.codes.device)
    for block in row_blocks(rows, columns, out.device):
        zero = None if canonical.zero is None else canonical.zero[block]
        out[block] = decode(canonical.codes[block], canonical.scale[block], zero, canonical.bits)
    return out


def decode(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, bits: int
) -> torch.Tensor:
    """Float32 weights `[rows, in]` of codes `[rows, in]`, scales and zeros `[rows, groups]`."""
    grouped = codes.float().view(codes.shape[0], scale.shape[1], -1)
    scale = scale.float().unsqueeze(-1)
    if zero is not None:
        grouped.sub_(1 << (bits - 1)).mul_(scale).add_(zero.float().unsqueeze(-1))
    else:
        grouped.mul_(scale)
    return grouped.view(codes.shape)


def row_blocks(rows: int, columns: int, device: torch.device, multiple: int = 1) -> Iterator[slice]:
    """Half-open row ranges of about the block size of `device`, each a `multiple` but the last."""
    step = (
        max(
            1,
            _BLOCK_WEIGHTS.get(device.type, _BLOCK_WEIGHTS["cuda"]) // max(1, columns) // multiple,
        )
        * multiple
    )
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes per byte: uint8 `[rows, in]` to `[rows, ceil(in / 2)]`.

    Byte j holds column j in its low half and column j + ceil(in / 2) in its high half.
    """
    half = -(-codes.shape[1] // 2)
    packed = codes[:, :half].clone()
    packed[:, : codes.shape[1] - half] |= codes[:, half:] << 4
    return packed


def unpack_nibbles(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Codes `[rows, columns]` of `pack_nibbles`."""
    half = packed.shape[1]
    codes = torch.empty(packed.shape[0], columns, dtype=torch.uint8, device=packed.device)
    codes[:, :half] = packed & 15
    codes[:, half:] = packed[:, : columns - half] >> 4
    return codes


def pack_planes(codes: torch.Tensor) -> torch.Tensor:
    """Three planes of one bit per weight: uint8 `[rows, in]` to `[3, rows, ceil(in / 8)]`.

    With s = ceil(in / 8), bit k of byte j of a plane belongs to column k * s + j.
    """
    rows, columns = codes.shape
    stride = -(-columns // 8)
    planes = torch.zeros(3, rows, stride, dtype=torch.uint8, device=codes.device)
    for position, part in enumerate(codes.chunk(8, dim=1)):
        for plane in range(3):
            planes[plane, :, : part.shape[1]] |= ((part >> plane) & 1) << position
    return planes


def unpack_planes(planes: torch.Tensor, columns: int) -> torch.Tensor:
    """Codes `[rows, columns]` of `pack_planes`."""
    rows, stride = planes.shape[1:]
    lowest_bit = 1
    if stride % 8 == 0:  # eight bytes at a time
        planes, lowest_bit = planes.view(torch.int64), _LOWEST_BITS
    positions = torch.arange(8, dtype=planes.dtype, device=planes.device).view(8, 1)
    bits = (planes.unsqueeze(2) >> positions).bitwise_and_(lowest_bit)
    codes = bits[2].mul_(2).add_(bits[1]).mul_(2).add_(bits[0])
    return codes.view(rows, -1).view(torch.uint8)[:, :columns]


def _empty(rows: int, columns: int, group: int, bits: int, device: torch.device) -> CanonicalWeight:
    groups = columns // group
    symmetric = bits == 8
    scale_type = torch.float32 if symmetric else torch.bfloat16
    return CanonicalWeight(
        codes=torch.empty(
            rows, columns, dtype=torch.int8 if symmetric else torch.uint8, device=device
        ),
        scale=torch.empty(rows, groups, dtype=scale_type, device=device),
        zero=None if symmetric else torch.empty(rows, groups, dtype=scale_type, device=device),
        bits=bits,
        group=group,
    )


def _quantize_block(weight: torch.Tensor, result: CanonicalWeight, block: slice) -> None:
    """Fill rows `block` of `result`; a float32 copy of these rows is the largest temporary."""
    values = weight.to(device=result.codes.device, dtype=torch.float32, copy=True)
    grouped = values.view(values.shape[0], -1, result.group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    _require_finite(high - low)
    if result.zero is None:
        scale = torch.maximum(low.neg(), high).div_(_INT8_LIMIT)
        scale.masked_fill_(scale == 0, 1.0)
        grouped.div_(scale.unsqueeze(-1)).round_().clamp_(-_INT8_LIMIT, _INT8_LIMIT)
    else:
        scale, zero = _affine_parameters(low, high, result.bits)
        half = 1 << (result.bits - 1)
        grouped.sub_(zero.unsqueeze(-1)).div_(scale.unsqueeze(-1)).round_()
        grouped.add_(half).clamp_(0, 2 * half - 1)
        result.zero[block] = zero
    result.scale[block] = scale
    result.codes[block] = values


def _affine_parameters(
    low: torch.Tensor, high: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero, float32 holding bfloat16 values, whose codes cover `low` to `high`."""
    half = 1 << (bits - 1)
    step = (high - low) / (2 * half - 1)
    zero = (low + half * step).bfloat16().float()
    scale = torch.maximum((high - zero) / (half - 1), (zero - low) / half)
    scale = _round_up_to_bfloat16(scale)
    return scale.masked_fill_(scale == 0, 1.0), zero


def _round_up_to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """The least bfloat16 not below each non-negative float32, as float32.

    A bfloat16 is the upper half of a float32, and the order of positive floats is that of their
    bits.
    """
    return ((values.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def _require_finite(spans: torch.Tensor) -> None:
    """Checks the spans of all groups: NaN and infinity pass through extremes into them."""
    bad = spans.numel() - int(torch.isfinite(spans).sum())
    if bad:
        raise CheckpointError(
            f"{bad} of {spans.numel()} weight groups hold NaN, infinite or overflowing values; "
            "the checkpoint is damaged"
        )
