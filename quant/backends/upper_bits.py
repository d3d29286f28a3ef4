"""Codes of 5 and 6 bit in blocks of 64 rows: the lowest four bits in the layout of torch's int4
kernel with AVX-512, and behind those of all columns the upper ones.

A column has a byte for the lowest bits of rows r and r + 32, and of the upper ones for rows r, r +
16, r + 32 and r + 48: at 5 bit half a byte, the lower one for the first of two columns, at 6 bit a
byte, beside that of the other column.
"""

from __future__ import annotations

import torch

from quant.devices import row_blocks

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
    if bits == 6:
        pairs = upper.unflatten(2, (_QUARTER, 2))
    else:
        pairs = torch.stack((upper & 15, upper >> 4), dim=-1)
    joined = pairs.permute(0, 2, 1, 3).flatten(2)
    count = bits - 4
    parts = [joined >> count * number & (1 << count) - 1 for number in range(4)]
    turned = low.transpose(1, 2)
    lowest = torch.cat((turned & 15, turned >> 4), dim=1)
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
