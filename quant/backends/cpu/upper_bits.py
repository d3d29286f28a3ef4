"""Codes of 4 to 6 bit in blocks of 64 rows: the lowest four bits in the layout of torch's int4
kernel with AVX-512, and behind those of all columns the upper ones.

A column has a byte for the lowest bits of rows r and r + 32, and of the upper ones for rows r, r +
16, r + 32 and r + 48: at 5 bit half a byte, the lower one for the first of two columns, at 6 bit a
byte, beside that of the other column. Scales of a block are restored for compiled loops.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from quant.devices import row_blocks
from quant.numba_loops import compiled_loop, widening
from quant.scheme import SUPER_BLOCK
from quant.super_blocks import GROUPS, heads_of

BLOCK_ROWS = 64
"""Rows that the kernel interleaves with AVX-512, and fewer without: ranges of rows that are
multiples of it have the same layout alone as within the whole."""

HALF_ROWS = BLOCK_ROWS // 2
_QUARTER = BLOCK_ROWS // 4

UPPER_BYTES = {3: 0, 4: 0, 5: BLOCK_ROWS // 8, 6: BLOCK_ROWS // 4}
"""Bytes of a column that its block has behind the lowest bits of all."""


def pack_blocks(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 `[rows, in]`, whole blocks of an even number of columns, to `[rows, in * bits /
    8]`.
    """
    rows, columns = codes.shape
    packed = codes.new_empty(rows, columns * bits // 8)
    for block in row_blocks(rows, columns, codes.device, multiple=BLOCK_ROWS):
        own = codes[block].view(-1, BLOCK_ROWS, columns)
        low, upper = _parts(packed[block], columns)
        halves = (own & 15).unflatten(1, (2, HALF_ROWS))
        low.copy_((halves[:, 0] | halves[:, 1] << 4).transpose(1, 2))
        if bits == 4:
            continue
        quarters = (own >> 4).unflatten(1, (4, _QUARTER))
        joined = quarters[:, 0]
        for number in range(1, 4):
            joined = joined | quarters[:, number] << (bits - 4) * number
        pairs = joined.unflatten(2, (-1, 2)).permute(0, 2, 1, 3)  # [blocks, in / 2, 16, 2]
        upper.copy_((pairs if bits == 6 else pairs[..., :1] | pairs[..., 1:] << 4).flatten(2))
    return packed


def unpack_blocks(packed: torch.Tensor, columns: int, bits: int) -> torch.Tensor:
    """Undo `pack_blocks`, on any device."""
    low, upper = _parts(packed, columns)
    turned = low.transpose(1, 2)
    lowest = torch.cat((turned & 15, turned >> 4), dim=1)
    if bits == 4:
        return lowest.view(-1, columns)
    if bits == 6:
        pairs = upper.unflatten(2, (_QUARTER, 2))
    else:
        pairs = torch.stack((upper & 15, upper >> 4), dim=-1)
    joined = pairs.permute(0, 2, 1, 3).flatten(2)
    count = bits - 4
    parts = [joined >> count * number & (1 << count) - 1 for number in range(4)]
    return lowest.add_(torch.cat(parts, dim=1) << 4).view(-1, columns)


def unpack_rows(packed: torch.Tensor, which: torch.Tensor, columns: int, bits: int) -> torch.Tensor:
    """The rows `which` `[n]` of what `unpack_blocks` gives."""
    low, upper = _parts(packed, columns)
    block, row, count = which // BLOCK_ROWS, which % BLOCK_ROWS, bits - 4
    half, quarter = ((row // each).to(torch.uint8).unsqueeze(1) for each in (HALF_ROWS, _QUARTER))
    lowest = low[block, :, row % HALF_ROWS] >> 4 * half & 15
    if bits == 6:
        joined = upper.unflatten(2, (_QUARTER, 2))[block, :, row % _QUARTER].flatten(1)
    else:
        pairs = upper[block, :, row % _QUARTER]
        joined = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
    return lowest.add_((joined >> count * quarter & (1 << count) - 1) << 4)


def _parts(packed: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of blocks `[blocks, in, 32]`, and `[blocks, in / 2, n]` for the upper bits."""
    blocks = packed.view(len(packed) // BLOCK_ROWS, -1)
    lowest = columns * HALF_ROWS
    return blocks[:, :lowest].unflatten(1, (columns, -1)), blocks[:, lowest:].unflatten(
        1, (columns // 2, -1)
    )


@functools.cache
def steps_of_pairs(bits: int) -> Any:
    """Compile what gives scales and values of code 0, float32 `[64]`, of a group of the 64 rows
    from `top` on, of `words` uint32 `[groups, rows]`.
    """
    half, upper, middle = np.uint32(16), np.uint32(0xFFFF0000), np.float32(1 << (bits - 1))

    def restore(words: Any, at: Any, steps: Any, zeros: Any) -> None:
        place, top, _ = at
        both = words[place, top : top + BLOCK_ROWS]
        for row in range(BLOCK_ROWS):
            step = np.uint32(both[row] << half).view(np.float32)
            zero = np.uint32(both[row] & upper).view(np.float32)
            steps[row], zeros[row] = step, zero - middle * step

    return compiled_loop(restore, parallel=False, exact=True)


@functools.cache
def steps_of_super_blocks(bits: int) -> Any:
    """As `steps_of_pairs`, of `words` uint16 `[pairs, rows]`, of so many `columns`."""
    widen, byte, eight = widening(torch.float16), np.uint16(255), np.uint16(8)
    heads, middle, has_minima = heads_of(bits), np.float32(1 << (bits - 1)), bits < 6
    groups = GROUPS if has_minima else 2 * GROUPS

    def restore(words: Any, at: Any, steps: Any, zeros: Any) -> None:
        place, top, columns = at
        block, before = place // groups * heads, columns // SUPER_BLOCK * heads
        factors = words[before + place * GROUPS // groups, top : top + BLOCK_ROWS]
        scales = words[block, top : top + BLOCK_ROWS]
        minima = words[block + heads - 1, top : top + BLOCK_ROWS]
        shift = np.uint16(0) if has_minima or place % 2 == 0 else eight
        for row in range(BLOCK_ROWS):
            factor = factors[row] >> shift & byte
            scale = widen(scales[row])
            if has_minima:
                steps[row] = scale * np.float32(factor)
                zeros[row] = -(widen(minima[row]) * np.float32(factors[row] >> eight))
            else:
                steps[row] = scale * np.float32(np.int8(factor))
                zeros[row] = -(middle * steps[row])

    return compiled_loop(restore, parallel=False, exact=True)
