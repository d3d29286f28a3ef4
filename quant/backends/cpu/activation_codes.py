"""Rounding activations to 8 bit token by token, in one pass compiled by numba: torch takes six."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quant.numba_loops import compiled_loop, has_numba, torch_threads, widening

LIMIT = 127
MIDDLE = 128
_LEAST_MAXIMUM = 1e-30
"""The largest magnitude that a token of zeros is given, so that its codes and results are zeros."""

_LEAST_NUMBERS = 2**14
"""Least numbers for the compiled loop: small models need not wait for the compiler."""

_TOKENS_FOR_THREADS = 256
"""Least tokens for several threads: fewer are done before a second thread is awake."""


def round_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round `x` `[tokens, in]` to uint8 codes `[tokens, in]` and float32 scales `[tokens, 1]`.

    The scale of a token with a number that is not finite is not finite either.
    """
    if x.numel() < _LEAST_NUMBERS or x.dtype != torch.bfloat16 or not has_numba():
        values = x.to(torch.float32, copy=True)
        scale = values.abs().amax(-1, keepdim=True).clamp_(min=_LEAST_MAXIMUM).div_(LIMIT)
        return values.div_(scale).add_(MIDDLE + 0.5).to(torch.uint8), scale  # which rounds down
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scale = torch.empty(len(x), 1)
    loop = _rounding(len(x) >= _TOKENS_FOR_THREADS and torch.get_num_threads() > 1)
    with torch_threads():
        loop(x.contiguous().view(torch.uint16).numpy(), codes.numpy(), scale.numpy())
    return codes, scale


def warm_up_rounding(width: int) -> None:
    """Compile in advance what rounding tokens of `width` bfloat16 numbers needs."""
    for tokens in (_TOKENS_FOR_THREADS - 1, _TOKENS_FOR_THREADS):
        round_activations(torch.zeros(tokens, width, dtype=torch.bfloat16))


@cache
def _rounding(parallel: bool) -> Any:
    """Compile the loop. It compares magnitudes as integers, in which NaN is above infinity."""
    import numba

    widen = widening(torch.bfloat16)
    no_sign, zero = np.uint16(0x7FFF), np.uint16(0)
    least, limit = np.float32(_LEAST_MAXIMUM), np.float32(LIMIT)
    middle = np.float32(MIDDLE + 0.5)

    def round_tokens(numbers: Any, codes: Any, scale: Any) -> None:
        tokens, width = numbers.shape
        for token in numba.prange(tokens):
            row, own = numbers[token], codes[token]
            largest = zero
            for i in range(width):
                largest = max(largest, row[i] & no_sign)
            magnitude = widen(largest)
            one = (least if magnitude < least else magnitude) / limit
            scale[token, 0] = one
            for i in range(width):
                own[i] = np.uint8(np.int32(widen(row[i]) / one + middle))

    return compiled_loop(round_tokens, parallel)
