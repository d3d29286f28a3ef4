"""Scales of the K-quants of GGUF as their files have them: a block of 256 columns has numbers of
float16, which small factors of its groups multiply.

    4, 5 bit    weight = code * (d * s) - dmin * m    s, m = 0 .. 63, of 32 columns
    6 bit       weight = (code - 32) * (d * s)        s = -128 .. 127, of 16 columns

A row is held as pairs of bytes, int8 `[n, 2]`: in front those of d and of dmin (little endian) of
each block, or of d alone, then s and m of each group, or s of two neighbouring ones: 4.625, 5.625
and 6.5625 bits a weight with the codes. Products of d and dmin with factors are exact in float32,
and so every weight is the number of the file, rounded as that is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.scheme import NARROW_GROUP, SUPER_BLOCK, Cut, super_block_pairs

GROUPS = SUPER_BLOCK // NARROW_GROUP
"""Pairs of bytes that a block has for its groups."""

_HALF_CODE = 32


def heads_of(bits: int) -> int:
    """Numbers of 16 bit that a block has."""
    return super_block_pairs(bits) - GROUPS


def decode_scales(held: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and values of code 0, float32 `[rows, groups]`, of int8 `[rows, pairs, 2]`."""
    rows, count = len(held), held.shape[1] // super_block_pairs(bits)
    heads, factors = held.split((count * heads_of(bits), count * GROUPS), 1)
    halves = heads.contiguous().view(torch.float16).view(rows, count, -1, 1).float()
    if bits == 6:
        scale = (halves[:, :, 0] * factors.reshape(rows, count, -1)).view(rows, -1)
        return scale, -_HALF_CODE * scale
    scale, low = (
        (halves[:, :, i] * factors[..., i].reshape(rows, count, -1)).view(rows, -1) for i in (0, 1)
    )
    return scale, low.neg_()


def cut_blocks(held: Tensor, bits: int, cut: Cut) -> Tensor:
    """The pairs of the columns of `cut`, which are whole blocks."""
    heads, count = heads_of(bits), held.shape[1] // super_block_pairs(bits)
    each = held.split((count * heads, count * GROUPS), 1)
    first, last = cut.begin // SUPER_BLOCK, cut.end // SUPER_BLOCK
    parts = zip(each, (heads, GROUPS), strict=True)
    return torch.cat([part[:, first * size : last * size] for part, size in parts], 1)
