"""Rounding activations to 8 bit token by token, after a rotation (`quant.backends.cpu.rotation`).

A compiled loop does both while a token is in the core's cache; torch takes twenty passes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quant.backends.cpu.rotation import LANES, compiled_rotation, rotate
from quant.numba_loops import exact_loop, has_numba, torch_threads, widening

LIMIT = 127
MIDDLE = 128
_LEAST_MAXIMUM = 1e-30
"""The largest magnitude that a token of zeros is given, so that its codes and results are zeros."""

_LEAST_NUMBERS = 2**14
"""Least numbers for the compiled loop: small models need not wait for the compiler."""

_TOKENS_FOR_THREADS = 256
"""Least tokens for several threads: fewer are done before a second thread is awake."""

_WORDS = {torch.bfloat16: torch.uint16, torch.float32: torch.float32}
"""The types that the compiled loop reads, and what it reads them as."""


def round_activations(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate `x * factor` and round it to uint8 codes `[tokens, in]` and float32 scales
    `[tokens, 1]`.

    `x`: `[tokens, in]`, `in` a multiple of 64; `factor`: float32 `[in]`. A token's codes do not
    depend on the others, nor on which of both ways computes them. The scale of a token with a
    number that is not finite is not finite either.
    """
    compiled = x.device.type == "cpu" and x.dtype in _WORDS and x.numel() >= _LEAST_NUMBERS
    if not compiled or not has_numba():
        values = rotate(x.to(torch.float32) * factor)
        largest = values.abs().amax(-1, keepdim=True).clamp_(min=_LEAST_MAXIMUM)
        steps = torch.full_like(largest, LIMIT).div_(largest)  # a number / tensor rounds twice
        codes = values.mul_(steps).add_(MIDDLE + 0.5).to(torch.uint8)  # which rounds down
        return codes, largest / LIMIT
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scale = torch.empty(len(x), 1)
    loop = _rounding(x.dtype, len(x) >= _TOKENS_FOR_THREADS and torch.get_num_threads() > 1)
    numbers = x.detach().contiguous().view(_WORDS[x.dtype])
    with torch_threads():
        loop(numbers.numpy(), factor.numpy(), codes.numpy(), scale.numpy())
    return codes, scale


def warm_up_rounding(width: int) -> None:
    """Compile in advance what rounding tokens of `width` bfloat16 numbers needs."""
    for tokens in (_TOKENS_FOR_THREADS - 1, _TOKENS_FOR_THREADS):
        round_activations(torch.zeros(tokens, width, dtype=torch.bfloat16), torch.ones(width))


@cache
def _rounding(dtype: torch.dtype, parallel: bool) -> Any:
    """Compile the loop. It compares magnitudes as integers, in which NaN is above infinity."""
    import numba

    widen, mix = widening(dtype), compiled_rotation()
    no_sign, zero = np.uint32(0x7FFFFFFF), np.uint32(0)
    least, limit = np.float32(_LEAST_MAXIMUM), np.float32(LIMIT)
    middle = np.float32(MIDDLE + 0.5)

    def round_tokens(numbers: Any, factor: Any, codes: Any, scale: Any) -> None:
        tokens, width = numbers.shape
        for token in numba.prange(tokens):
            row, own = numbers[token], codes[token]
            values = np.empty(width, np.float32)
            for i in range(width):
                values[i] = widen(row[i]) * factor[i]
            mix(values, width // LANES)
            bits, largest = values.view(np.uint32), zero
            for i in range(width):
                largest = max(largest, bits[i] & no_sign)
            magnitude = np.uint32(largest).view(np.float32)
            magnitude = least if magnitude < least else magnitude
            scale[token, 0] = magnitude / limit
            steps = limit / magnitude
            for i in range(width):
                own[i] = np.uint8(np.int32(values[i] * steps + middle))

    return exact_loop(round_tokens, parallel)
