"""Integer codes of a weight, in groups of columns that share a scale and a zero, and the words of
32 bits that checkpoints pack them into.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quant.checkpoint.stored_config import WORD_BITS
from quant.common.errors import CheckpointError
from quant.devices import row_blocks

WORD_MASK = (1 << WORD_BITS) - 1
_FIRST_PART, _SECOND_PART = 21, 11
"""3-bit codes that start below bit 63 of 96, and those from there on: both parts fit an int64."""


@dataclass(frozen=True)
class GroupCodes:
    """A weight `(code - zero) * scale + low`: `codes` uint8 `[out, in]`; `scale` float `[out,
    groups]`; `zero` uint8 `[out, groups]`; `group_of_column` int32 `[in]`; `low` float `[out,
    groups]` where the lowest weight of a group is no multiple of its scale, else None. `narrow`:
    scale and low have a byte each, as `quant.narrow` can hold them, and zero is the middle
    code.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group_of_column: torch.Tensor
    bits: int
    low: torch.Tensor | None = None
    narrow: bool = False

    def check_finite(self, place: str) -> None:
        sizes = self.scale if self.low is None else torch.stack((self.scale, self.low))
        if not bool(torch.isfinite(sizes).all()):
            raise CheckpointError(
                f"{place}: its scales hold NaN or infinity; the checkpoint is damaged"
            )

    def dequantize(self) -> torch.Tensor:
        out = torch.empty(self.codes.shape)
        rows, columns = self.codes.shape
        for block in row_blocks(rows, columns, out.device):
            out[block] = self.rows(block)
        return out

    def split_rows(self, parts: int) -> list[GroupCodes]:
        """As many weights of equal numbers of rows below each other."""
        each = [part.chunk(parts) for part in (self.codes, self.scale, self.zero)]
        lows = (None,) * parts if self.low is None else self.low.chunk(parts)
        return [
            replace(
                self,
                codes=codes,
                scale=scale,
                zero=zero,
                low=low,
                group_of_column=self.group_of_column.clone(),  # of files, no two may share memory
            )
            for codes, scale, zero, low in zip(*each, lows, strict=True)
        ]

    def rows(self, block: slice) -> torch.Tensor:
        columns = self.group_of_column.long()
        centred = self.codes[block].float().sub_(self.zero[block].float()[:, columns])
        centred.mul_(self.scale[block].float()[:, columns])
        return centred if self.low is None else centred.add_(self.low[block].float()[:, columns])


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes `[rows, n]` to int32 words `[rows, n * bits / 32]`; n has to fill whole words."""
    rows = codes.shape[0]
    if bits != 3:
        shifts = torch.arange(0, WORD_BITS, bits)
        words = (codes.long().view(rows, -1, WORD_BITS // bits) << shifts).sum(-1)
        return words.to(torch.int32)
    parts = codes.long().reshape(rows, -1, WORD_BITS)
    shifts = 3 * torch.arange(_FIRST_PART)
    low = (parts[..., :_FIRST_PART] << shifts).sum(-1)
    high = (parts[..., _FIRST_PART:] << shifts[:_SECOND_PART]).sum(-1)
    words = torch.stack((low, (low >> WORD_BITS) | (high << (WORD_BITS - 1)), high >> 1), dim=-1)
    return words.to(torch.int32).view(rows, -1)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack codes uint8 `[rows, count]` from int32 words `[rows, ceil(count * bits / 32)]`."""
    words, rows = words.contiguous(), words.shape[0]
    if bits != 3:
        shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
        codes = (words.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1)
        return codes.view(rows, -1)[:, :count].to(torch.uint8)
    triples = torch.nn.functional.pad(words, (0, -words.shape[1] % 3)).long() & WORD_MASK
    first, second, third = triples.view(rows, -1, 3).unbind(-1)
    shifts = 3 * torch.arange(_FIRST_PART)
    low = (first | (second << WORD_BITS)).unsqueeze(-1) >> shifts
    high = ((second >> (WORD_BITS - 1)) | (third << 1)).unsqueeze(-1) >> shifts[:_SECOND_PART]
    codes = torch.cat((low, high), dim=-1).bitwise_and_(7)
    return codes.view(rows, -1)[:, :count].to(torch.uint8)
