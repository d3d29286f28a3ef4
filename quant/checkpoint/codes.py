"""Integer codes of a weight, in groups of columns that share a scale and a zero, and the words of
32 bits that checkpoints pack them into.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quant.checkpoint.stored_config import WORD_BITS, period_of
from quant.common.errors import CheckpointError
from quant.devices import row_blocks

WORD_MASK = (1 << WORD_BITS) - 1


@dataclass(frozen=True)
class GroupCodes:
    """A weight `(code - zero) * scale + low`: `codes` uint8 `[out, in]`; `scale` float `[out,
    groups]`; `zero` uint8 `[out, groups]`; `group_of_column` int32 `[in]`; `low` float `[out,
    groups]` where the lowest weight of a group is no multiple of its scale, else None. `narrow`:
    scale and low have a byte each, as `quant.narrow` can hold them, and zero is the middle
    code. `held`: scale and low are those of super-blocks (`quant.super_blocks`).
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group_of_column: torch.Tensor
    bits: int
    low: torch.Tensor | None = None
    narrow: bool = False
    held: torch.Tensor | None = None

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
        assert self.held is None, "asked of what is made here"
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
    """Pack codes `[rows, n]` to int32 words `[rows, n * bits / 32]`, one code after another from
    the lowest bit on; n has to fill whole words.
    """
    rows, period = len(codes), period_of(bits)
    own = codes.long().reshape(rows, -1, period)
    words = own.new_zeros(*own.shape[:2], period * bits // WORD_BITS)
    for place in range(period):
        word, bit = divmod(bits * place, WORD_BITS)
        words[..., word] |= own[..., place] << bit
        if bit + bits > WORD_BITS:
            words[..., word + 1] |= own[..., place] >> WORD_BITS - bit
    return words.bitwise_and_(WORD_MASK).to(torch.int32).view(rows, -1)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack codes uint8 `[rows, count]` from int32 words `[rows, ceil(count * bits / 32)]`."""
    words, rows = words.contiguous(), words.shape[0]
    if WORD_BITS % bits == 0:
        shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
        codes = (words.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1)
        return codes.view(rows, -1)[:, :count].to(torch.uint8)
    period = period_of(bits)
    together = period * bits // WORD_BITS
    held = torch.nn.functional.pad(words, (0, -words.shape[1] % together)).long() & WORD_MASK
    held = held.view(rows, -1, together)
    unpacked = torch.empty(*held.shape[:2], period, dtype=torch.uint8)
    for place in range(period):
        word, bit = divmod(bits * place, WORD_BITS)
        code = held[..., word] >> bit
        if bit + bits > WORD_BITS:
            code |= held[..., word + 1] << WORD_BITS - bit
        unpacked[..., place] = code.bitwise_and_((1 << bits) - 1)
    return unpacked.view(rows, -1)[:, :count]
