"""The canonical form of a quantized weight: integer codes with a scale and a zero per group.

3 to 6 bit are affine per group of a row, 8 bit is symmetric per row:

    weight ~ (code - 2^(bits-1)) * scale + zero     3 to 6 bit, codes 0 .. 2^bits - 1
    weight ~ code * scale                           8 bit, codes -128 .. 127

Scale and zero of rounded 3 to 6 bit are bfloat16, the only type that torch's int4pack kernel takes
with bfloat16 activations; it neither overflows nor underflows where a weight does not. Of groups of
32 they are such that a byte each can hold them (`quant.narrow`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quant.common.errors import CheckpointError, SpecError
from quant.devices import moved_blocks, row_blocks
from quant.narrow import range_factor
from quant.rounding.group_fit import Grid
from quant.rounding.ways import DEFAULT, Rounding, affine_codes, check_finite, symmetric_codes
from quant.rounding.weighted import column_importance, fit, is_compiled
from quant.scheme import (
    AFFINE_BITS,
    NARROW_GROUP,
    NEAR_FULL_BITS,
    ROWS,
    Cut,
    ScaleForm,
    code_bytes,
    part_form,
    part_group,
    rounded_group,
)
from quant.super_blocks import cut_blocks, decode_scales

CANONICAL_BITS = (*AFFINE_BITS, NEAR_FULL_BITS)
_KNOWN = ", ".join(map(str, CANONICAL_BITS))

_NIBBLE_BITS, _NIBBLE = 4, 15
_SCALE_BYTES = 2

_RANGED_WEIGHTS = 1 << 16
"""Weights whose ranges are taken at once: the copy in float32 that this needs stays in a cache."""

_LOWEST_BITS = 0x01010101
"""The lowest bit of each byte of a 32-bit word."""


@dataclass(frozen=True)
class CanonicalWeight:
    """A weight `[out, in]`: `codes` uint8 (3 to 6 bit) or int8 `[out, in]`; `scale` and `zero`
    `[out, groups]` bfloat16 or, from a GPTQ checkpoint, float16 and float32; at 8 bit `scale` is
    float32 `[out, 1]` and `zero` None. `group` divides `in`. `narrow`: `quant.narrow` can
    hold scale and zero. `held`: they are those of super-blocks, int8 `[out, pairs, 2]`
    (`quant.super_blocks`), in float32.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    bits: int
    group: int
    narrow: bool = False
    held: torch.Tensor | None = None

    @property
    def form(self) -> ScaleForm:
        if self.held is not None:
            return ScaleForm.SUPER_BLOCKS
        return ScaleForm.NARROW if self.narrow else ScaleForm.PAIRS

    def to(self, device: torch.device) -> CanonicalWeight:
        if self.codes.device == device:
            return self
        codes, scale = self.codes.to(device), self.scale.to(device)
        zero, held = (None if each is None else each.to(device) for each in (self.zero, self.held))
        return replace(self, codes=codes, scale=scale, zero=zero, held=held)


def rows_joined(parts: Sequence[CanonicalWeight]) -> CanonicalWeight:
    """Put weights of the same inputs below each other; CheckpointError where bits, groups or how
    scales are held are unlike.
    """
    first = parts[0]
    own = first.bits, first.group, first.form
    if any((each.bits, each.group, each.form) != own for each in parts):
        found = ", ".join(f"{each.bits} bits in groups of {each.group}" for each in parts)
        raise CheckpointError(f"its parts are stored with {found}, and have to be alike")
    zeros = [each.zero for each in parts if each.zero is not None]
    held = [each.held for each in parts if each.held is not None]
    return replace(
        first,
        codes=torch.cat([each.codes for each in parts]),
        scale=torch.cat([each.scale for each in parts]),
        zero=torch.cat(zeros) if zeros else None,
        held=torch.cat(held) if held else None,
    )


def quantize(
    weight: torch.Tensor,
    bits: int,
    device: torch.device | None = None,
    rounding: Rounding = DEFAULT,
) -> CanonicalWeight:
    """Round `weight` `[out, in]` on `device`, in row blocks, so that temporaries stay at megabytes.
    SpecError for other bits than 3 to 6 and 8; CheckpointError if it is not finite.
    """
    way = _Way.of(weight, bits, device or weight.device, rounding)
    return _quantized(weight, way, rounding.generator())


def quantize_part(
    weight: torch.Tensor,
    bits: int,
    cut: Cut,
    device: torch.device | None = None,
    rounding: Rounding = DEFAULT,
) -> CanonicalWeight:
    """Return `part_of` what `quantize` makes of the whole, of which only columns that share a scale
    with the part are rounded.
    """
    way = _Way.of(weight, bits, device or weight.device, rounding)
    draws = rounding.generator()
    if draws is not None:  # one for each weight of the whole
        return part_of(_quantized(weight, way, draws), cut)
    if cut.dimension == ROWS:
        return _quantized(weight[cut.index], way, None)
    span = cut.whole_groups(way.group)
    if way.importance is not None:
        way = replace(way, importance=way.importance[span.start : span.stop])
    inner = cut.within(span)
    group = cut.length if bits == 8 else part_group(way.group, inner)
    result = _empty(len(weight), cut.length, group, bits, way.device)
    region = weight[:, span.start : span.stop]
    blocks = row_blocks(len(region), weight.shape[1], way.device)
    for block, rows in moved_blocks(region, blocks, way.device):
        factor = way.factor_of(weight[block])
        own = part_of(_quantized(rows.contiguous(), way, None, factor), inner)
        result.codes[block], result.scale[block] = own.codes, own.scale
        if result.zero is not None and own.zero is not None:
            result.zero[block] = own.zero
    return result


def part_of(canonical: CanonicalWeight, cut: Cut) -> CanonicalWeight:
    codes, scale, zero = canonical.codes[cut.index], canonical.scale, canonical.zero
    if cut.dimension == ROWS:
        zero, held = (None if each is None else each[cut.index] for each in (zero, canonical.held))
        return replace(canonical, codes=codes, scale=scale[cut.index], zero=zero, held=held)
    if zero is None:
        return replace(canonical, codes=codes.contiguous(), group=cut.length)
    group = part_group(canonical.group, cut)
    first = torch.arange(cut.begin, cut.end, group, device=scale.device)
    groups, held = first // canonical.group, None
    if canonical.held is not None:
        if part_form(canonical.form, cut) is ScaleForm.SUPER_BLOCKS:
            held = cut_blocks(canonical.held, canonical.bits, cut)
        else:
            scale = in_16_bits(scale)
    return replace(
        canonical,
        codes=codes.contiguous(),
        scale=scale[:, groups],
        zero=zero[:, groups],
        group=group,
        narrow=canonical.narrow and group == canonical.group,
        held=held,
    )


def in_16_bits(scale: torch.Tensor) -> torch.Tensor:
    """Scales as backends hold them: of wider ones those in float16, if it has their exponents."""
    if scale.element_size() <= _SCALE_BYTES:
        return scale
    limits, sizes = torch.finfo(torch.float16), scale[scale != 0].abs()
    fits = bool(((sizes >= limits.tiny) & (sizes <= limits.max)).all())
    return scale.to(torch.float16 if fits else torch.bfloat16)


@dataclass(frozen=True)
class _Way:
    """How rows are rounded on `device`; `importance` `[in]` where scales are fitted, by a
    `compiled` loop or torch; None: codes are nearest or drawn.
    """

    bits: int
    group: int
    device: torch.device
    importance: torch.Tensor | None
    compiled: bool = False

    @classmethod
    def of(cls, weight: torch.Tensor, bits: int, device: torch.device, rounding: Rounding) -> _Way:
        if bits not in CANONICAL_BITS:
            raise SpecError(f"cannot quantize to {bits} bits; choose one of {_KNOWN}")
        if weight.dim() != 2 or not weight.is_floating_point():
            raise CheckpointError(
                f"cannot quantize a {weight.dtype} tensor of shape {list(weight.shape)}: "
                "a float matrix is needed (is the checkpoint quantized already?)"
            )
        columns = weight.shape[1]
        group = columns if bits == 8 else rounded_group(columns)
        if rounding.mode != "weighted" or (bits == 8 and rounding.inputs is None):
            return cls(bits, group, device, None)
        importance = column_importance(rounding.inputs, columns)
        return cls(bits, group, device, importance, is_compiled(weight, device))

    @property
    def narrow(self) -> bool:
        return self.bits != 8 and self.group == NARROW_GROUP

    def factor_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Powers of two of whole rows; None where groups have numbers of bfloat16."""
        if not self.narrow:
            return None
        factors = []
        for few in rows.split(max(1, _RANGED_WEIGHTS // rows.shape[1])):
            grouped = few.to(device=self.device, dtype=torch.float32).unflatten(1, (-1, self.group))
            factors.append(range_factor(grouped.amin(-1), grouped.amax(-1), self.bits))
        return torch.cat(factors)


def _quantized(
    weight: torch.Tensor,
    way: _Way,
    draws: torch.Generator | None,
    factor: torch.Tensor | None = None,
) -> CanonicalWeight:
    """Round `weight`, whose rows may be parts of those that `factor` is of."""
    rows, columns = weight.shape
    result = _empty(rows, columns, way.group, way.bits, way.device)
    for block, part in moved_blocks(weight, row_blocks(rows, columns, way.device), way.device):
        own = way.factor_of(part) if factor is None else factor[block]
        if way.importance is None:
            _quantize_block(part, result, block, draws, own)
        else:
            _fit_block(part.to(way.device), result, block, way, own)
    return result


def dequantize(canonical: CanonicalWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows, columns = canonical.codes.shape
    out = torch.empty(rows, columns, dtype=dtype, device=canonical.codes.device)
    held, bits = canonical.held, canonical.bits
    for block in row_blocks(rows, columns, out.device):
        scale = canonical.scale[block]
        zero = None if canonical.zero is None else canonical.zero[block]
        if held is not None:  # what code 0 stands for is exact
            scale, zero = decode_scales(held[block], bits)
        out[block] = decode(canonical.codes[block], scale, zero, bits, None, held is not None)
    return out


def decode(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bits: int,
    out: torch.Tensor | None = None,
    from_lowest: bool = False,
) -> torch.Tensor:
    """Decode `[rows, in]` with scales and zeros `[rows, groups]` to float32 `[rows, in]`;
    `from_lowest`: zeros are the values of code 0.
    """
    values = codes.float() if out is None else out.copy_(codes)
    grouped = values.view(*scale.shape, codes.shape[1] // scale.shape[1])
    scale = scale.float().unsqueeze(-1)
    if zero is not None:
        centred = grouped if from_lowest else grouped.sub_(1 << (bits - 1))
        centred.mul_(scale).add_(zero.float().unsqueeze(-1))
    else:
        grouped.mul_(scale)
    return values


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack affine codes uint8 `[rows, in]` row by row: from 4 bit on the lowest four bits, column j
    in the low half of a byte and j + ceil(in / 2) in the high one; then each bit that is left, of
    which byte j has columns j, s + j, 2 s + j and on, with s = ceil(in / 8).
    """
    rows, columns = codes.shape
    packed = codes.new_zeros(rows, code_bytes(columns, bits))
    low, planes = _packed_parts(packed, columns, bits)
    half = low.shape[1]
    if half:
        low.copy_(codes[:, :half] & _NIBBLE)
        low[:, : columns - half] |= codes[:, half:] << _NIBBLE_BITS
    first = bits - planes.shape[1]
    for position, part in enumerate(codes.chunk(8, dim=1)):
        for plane in range(planes.shape[1]):
            planes[:, plane, : part.shape[1]] |= ((part >> first + plane) & 1) << position
    return packed


def unpack_codes(
    packed: torch.Tensor, columns: int, bits: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Undo `pack_codes`, in `out` `[rows, in]` if there is one."""
    low, planes = _packed_parts(packed, columns, bits)
    codes = packed.new_empty(len(packed), columns) if out is None else out
    half = low.shape[1]
    if half:
        torch.bitwise_and(low, _NIBBLE, out=codes[:, :half])
        torch.bitwise_right_shift(low[:, : columns - half], _NIBBLE_BITS, out=codes[:, half:])
    if bits == _NIBBLE_BITS:
        return codes
    upper = _unpacked_planes(planes, columns)
    return codes.add_(upper, alpha=1 << _NIBBLE_BITS) if half else upper


def _packed_parts(
    packed: torch.Tensor, columns: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Nibbles `[rows, ceil(in / 2)]`, of 3 bit none, and planes `[rows, n, ceil(in / 8)]`."""
    half = -(-columns // 2) if bits >= _NIBBLE_BITS else 0
    return packed[:, :half], packed[:, half:].unflatten(1, (-1, -(-columns // 8)))


def _unpacked_planes(planes: torch.Tensor, columns: int) -> torch.Tensor:
    count, stride = planes.shape[1:]
    lowest_bit = 1
    if stride % 4 == 0:  # four bytes at a time
        planes, lowest_bit = planes.view(torch.int32), _LOWEST_BITS
    positions = torch.arange(8, dtype=planes.dtype, device=planes.device).view(8, 1)
    bits = (planes.unsqueeze(2) >> positions).bitwise_and_(lowest_bit)
    codes = bits[:, count - 1]
    for plane in reversed(range(count - 1)):
        codes = torch.add(bits[:, plane], codes, alpha=2)
    return codes.flatten(1).view(torch.uint8)[:, :columns]


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
        narrow=not symmetric and group == NARROW_GROUP,
    )


def _quantize_block(
    weight: torch.Tensor,
    result: CanonicalWeight,
    block: slice,
    draws: torch.Generator | None,
    factor: torch.Tensor | None,
) -> None:
    """Fill rows `block`; float32 copies of these rows are the largest temporaries."""
    values = weight.to(device=result.codes.device, dtype=torch.float32, copy=True)
    grouped = values.view(values.shape[0], -1, result.group)
    if result.zero is None:
        result.scale[block] = symmetric_codes(grouped, draws)
    else:
        scale, zero = affine_codes(grouped, result.bits, draws, factor)
        result.scale[block], result.zero[block] = scale, zero
    result.codes[block] = values


def _fit_block(
    weight: torch.Tensor,
    result: CanonicalWeight,
    block: slice,
    way: _Way,
    factor: torch.Tensor | None,
) -> None:
    assert way.importance is not None, "scales are fitted by it"
    grid: Grid = "middle" if result.zero is None else "free" if factor is None else "narrow"
    codes, scale, zero, bad = fit(
        weight, way.importance, way.bits, way.group, grid, way.compiled, factor
    )
    check_finite(bad, scale.numel())
    if result.zero is None:
        codes = codes.bitwise_xor_(1 << (way.bits - 1)).view(torch.int8)  # less the middle code
    else:
        result.zero[block] = zero
    result.codes[block], result.scale[block] = codes, scale
