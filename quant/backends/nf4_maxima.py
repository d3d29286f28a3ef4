"""Codes and maxima of nf4: decoding them, and fitting each block's maximum to its weights, columns
weighed by their inputs.

A weight is a value of a table of 16, from -1 to 1, times the block's maximum. Any positive number
may stand as this maximum: it need not be that of the weights, of which the largest are then cut.
As in `quant.rounding.weighted`, the fit alternates between nearest values and least squares, from
several shares of the true maximum, and keeps the best.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.backends.table import NF4_BLOCK
from quant.canonical import row_blocks

_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)
"""Shares of the maximum that the fit starts from."""

_ROUNDS = 3
"""Least squares after each start; further ones change less than 1 % of the error."""


def fit_maxima(
    weight: Tensor, importance: Tensor, packed: Tensor, maxima: Tensor, table: Tensor
) -> None:
    """Replace the codes and maxima that bitsandbytes has chosen for `weight` `[out, in]`.

    `importance` float32 `[in]`; `packed` uint8 `[out * in / 2, 1]`, the first of two codes in the
    high half; `maxima` float32 `[blocks]`; `table` float32 `[16]`, ascending. The last block may be
    shorter than the others; it stays as it is.
    """
    whole = weight.numel() // NF4_BLOCK
    blocks = weight.reshape(-1)[: whole * NF4_BLOCK].view(whole, NF4_BLOCK)
    codes_at = packed.view(-1)[: whole * NF4_BLOCK // 2].view(whole, -1)
    columns = weight.shape[1]
    importance = importance.to(weight.device)
    inside = torch.arange(NF4_BLOCK, device=weight.device)
    for own in row_blocks(whole, NF4_BLOCK, weight.device):
        first = torch.arange(own.start, own.stop, device=weight.device) * NF4_BLOCK
        weights = importance[(first.unsqueeze(-1) + inside).remainder_(columns)]
        values = blocks[own].float()
        best = _best_maxima(values, weights, maxima[own], table)
        codes = _codes(values, best, table).to(torch.uint8)
        maxima[own] = best
        codes_at[own] = (codes[:, ::2] << 4) | codes[:, 1::2]


def decoded(packed: Tensor, maxima: Tensor, table: Tensor, shape: torch.Size) -> Tensor:
    """The weight of `shape` that codes and maxima stand for, which are as in `fit_maxima`."""
    codes = torch.stack((packed.view(-1) >> 4, packed.view(-1) & 15), -1).view(-1)
    blocks = maxima.repeat_interleave(NF4_BLOCK)[: shape.numel()]
    return (table[codes[: shape.numel()].int()] * blocks).view(shape)


def _best_maxima(values: Tensor, importance: Tensor, maxima: Tensor, table: Tensor) -> Tensor:
    """The maxima `[blocks]` of the least weighted squared error that was found."""
    best, least = maxima, _error(values, importance, maxima, table)
    for share in _SHARES:
        maximum = maxima * share
        for _ in range(_ROUNDS):
            nearest = table[_codes(values, maximum, table)]
            weighted = nearest * importance
            square = (weighted * nearest).sum(-1)
            slope = (weighted * values).sum(-1)
            maximum = torch.where((square > 0) & (slope > 0), slope / square, maximum)
            error = _error(values, importance, maximum, table)
            better = error < least
            best, least = torch.where(better, maximum, best), torch.where(better, error, least)
    return best


def _error(values: Tensor, importance: Tensor, maxima: Tensor, table: Tensor) -> Tensor:
    restored = table[_codes(values, maxima, table)] * maxima.unsqueeze(-1)
    return restored.sub_(values).square_().mul_(importance).sum(-1)


def _codes(values: Tensor, maxima: Tensor, table: Tensor) -> Tensor:
    """Places of the nearest values of the table, int64 `[blocks, block]`."""
    middles = (table[1:] + table[:-1]) / 2
    return torch.bucketize(values / maxima.clamp(min=1e-38).unsqueeze(-1), middles)
