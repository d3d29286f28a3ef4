"""The order of codes in memory that the CUDA source reads, packed and unpacked in torch.

Eight consecutive columns, an octet, are `bits` bytes: column i at bit `bits * i` of that
little-endian number. 4-bit rows are their octets in turn. Four 3-bit octets are three 32-bit words,
and a row holds all first words, all second, all third. 8-bit codes are bytes as they are.
"""

from __future__ import annotations

import torch

from quant.canonical import row_blocks

_OCTET = 8
_RUN = 32
"""Columns whose 3-bit codes fill three whole words."""


def pack_octets(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack 3- or 4-bit codes, uint8 `[out, in]` with `in` a multiple of 32.

    The result is uint8 `[out, in / 2]` at 4 bit and int32 `[out, 3, in / 32]` at 3 bit.
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
    """Unpack the codes uint8 `[out, in]` of `pack_octets`."""
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
