"""Codes that a checkpoint stores, in the canonical form of kernels.

A weight is `(code - zero) * scale`. In the canonical form that is `(code - half) * scale + (half -
zero) * scale`: exact with the scale in its own float16 and the product in float32. A backend that
holds both in 16 bits keeps the scale exact in float16 and rounds the product (2^-11 of it); one
that holds bfloat16 (int4pack, the CUDA kernels) rounds both to 2^-9, at most 0.03 of a step where
rounding to codes costs 0.5. Super-blocks of GGUF are held as they are. 8-bit GPTQ is affine per
group, the canonical 8-bit form symmetric per row, which every 8-bit kernel takes: it is quantized
once more, to the nearest of its 255 codes, unless it has that form already (W8A8 of
compressed-tensors).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quant.checkpoint.codes import GroupCodes
from quant.common.errors import CheckpointError
from quant.devices import row_blocks
from quant.rounding.canonical import CanonicalWeight, in_16_bits, quantize
from quant.scheme import group_size

_MIDDLE = 128
"""The 8-bit code that stands for 0 in weights with a sign."""


@dataclass(frozen=True)
class StoredWeight:
    """A canonical weight, and the inputs of its columns, int32 `[in]`; None: in order."""

    canonical: CanonicalWeight
    input_order: torch.Tensor | None


def to_canonical(weight: GroupCodes) -> StoredWeight:
    """Convert to the canonical form: exact at 3 and 4 bit, and at 8 bit where rows have one scale
    and the middle code as zero, else quantized again per row. CheckpointError for groups that do
    not share the columns evenly.
    """
    columns = weight.codes.shape[1]
    if weight.bits == 8:
        return StoredWeight(_symmetric_rows(weight), None)
    groups = weight.scale.shape[1]
    order = weight.group_of_column.argsort(stable=True)
    evenly = torch.arange(groups).repeat_interleave(columns // groups)
    if columns % groups or not torch.equal(weight.group_of_column[order].long(), evenly):
        raise CheckpointError(
            f"its {columns} columns lie in {groups} groups of unequal size, which kernels do not "
            "take; quantize the model again with a group size that divides its widths"
        )
    in_order = bool((order == torch.arange(columns)).all())
    repeats = _parts_of_group(columns // groups, columns)
    half = 1 << (weight.bits - 1)
    scale = weight.scale if weight.held is not None else in_16_bits(weight.scale)
    if weight.low is None:
        zero = (half - weight.zero.float()) * scale.float()
    else:  # of the scale before it was rounded, so that errors are those of half the codes
        zero = (half - weight.zero.float()) * weight.scale.float() + weight.low.float()
    canonical = CanonicalWeight(
        codes=weight.codes if in_order else weight.codes[:, order],
        scale=scale.repeat_interleave(repeats, dim=1),
        zero=zero.repeat_interleave(repeats, dim=1),
        bits=weight.bits,
        group=columns // groups // repeats,
        narrow=weight.narrow,
        held=weight.held,
    )
    return StoredWeight(canonical, None if in_order else order.int())


def _symmetric_rows(weight: GroupCodes) -> CanonicalWeight:
    rows, columns = weight.codes.shape
    if weight.scale.shape[1] == 1 and bool((weight.zero == _MIDDLE).all()):
        own = (weight.codes ^ _MIDDLE).view(torch.int8)
        return CanonicalWeight(own, weight.scale.to(torch.float32, copy=True), None, 8, columns)
    codes = torch.empty(rows, columns, dtype=torch.int8)
    scale = torch.empty(rows, 1)
    for block in row_blocks(rows, columns, codes.device):
        part = quantize(weight.rows(block), 8)
        codes[block], scale[block] = part.codes, part.scale
    return CanonicalWeight(codes, scale, None, 8, columns)


def _parts_of_group(group: int, columns: int) -> int:
    """Count the parts of the usual size into which a larger group is split: kernels that take
    groups of 128 columns but not whole rows can run then, in the planned bytes.
    """
    usual = group_size(columns)
    return group // usual if group > usual and group % usual == 0 else 1
