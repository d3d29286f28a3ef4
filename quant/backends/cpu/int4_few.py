"""Products of a few tokens with codes of 3 to 6 bit and scales of bytes, compiled, in the blocks
of 64 rows of torch's int4 kernel: that one would need scales of 32 bit, and codes of 4.

Codes of a group are multiplied as they are, and its scale and zero once, each for a row without the
row's power of two (`quant.narrow`):

    f * sum over groups of (s * (sum of x * code - half * sum of x) + zero * sum of x)

Super-blocks have no such power, and what code 0 stands for in place of the zero.

Where the CPU multiplies pairs of bfloat16 numbers, a code becomes one by standing in the mantissa
of 128 + code, and 128 is subtracted with `half`.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from quant.backends.base import form_of
from quant.backends.cpu.int4_vectors import (
    QUARTERS,
    RUNS,
    columns_of_run,
    has_wide_vectors,
    run_added,
)
from quant.backends.cpu.upper_bits import BLOCK_ROWS, HALF_ROWS, UPPER_BYTES
from quant.devices import local_processor
from quant.numba_loops import compiled_loop, prefetching, torch_threads
from quant.scheme import NARROW_GROUP, ScaleForm

AT_ONCE, _AT_ONCE_WIDE = (1, 2, 4), 8
"""Tokens whose sums are in registers, with AVX-512 and without; of eight, and without it of two and
four, those of half of the rows at a time."""

_PARTS = {3: QUARTERS, 4: 1, 5: 1, 6: 1}

_AHEAD = 256
"""Columns by which codes are asked of memory before they are used, and scales a block before: a
product of one token takes two thirds of the time at 4 bit, and a third at 3 bit, where parts
and rows of scales are too many places for the CPU to foresee."""

_MOST_TOKENS, _MOST_OF_PAIRS = 31, 63
"""Beyond, a product with decoded rows takes less time: 4096 x 4096 at 4 bit on one core of an AMD
EPYC (Zen 5), with products of pairs, 6.3 ms in both ways for 64 tokens."""


def takes(bits: int, columns: int, tokens: int) -> bool:
    if not fits(bits, columns):
        return False
    return tokens <= (_MOST_OF_PAIRS if multiplies_pairs() else _MOST_TOKENS)


def fits(bits: int, columns: int) -> bool:
    return columns % (RUNS[bits] * _PARTS[bits]) == 0


def at_once() -> tuple[int, ...]:
    """Numbers of tokens that have a loop."""
    return (*AT_ONCE, _AT_ONCE_WIDE) if has_wide_vectors() else AT_ONCE


def warm_up(bits: int, columns: int, packed: torch.Tensor, scales: torch.Tensor) -> None:
    """Compile the loops, which multiply with a block of `packed` and `scales` for this."""
    block, own = packed[:BLOCK_ROWS], scales[:, :BLOCK_ROWS].contiguous()
    for tokens in at_once():
        multiply(bits, torch.zeros(tokens, columns, dtype=torch.bfloat16), block, own)


@functools.cache
def multiplies_pairs() -> bool:
    """Whether this CPU adds products of two pairs of bfloat16 numbers to a sum at once, and numba
    is not told to compile for another one.
    """
    import numba

    settings: Any = numba.config
    is_own = settings.CPU_NAME is None and settings.CPU_FEATURES is None and settings.ENABLE_AVX
    here = local_processor(torch.device("cpu")).instruction_sets
    return bool(is_own) and "avx512_bf16" in here


def multiply(
    bits: int, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Multiply bfloat16 `x` `[tokens, in]` with a weight of whole blocks: `packed` and `scales` as
    `quant.backends.cpu.int4pack` holds them, of bytes.
    """
    tokens, pairs, form = len(x), multiplies_pairs(), form_of(scales)
    known = at_once()
    together = next((each for each in known if tokens <= each), known[-1])
    if tokens % together:
        x = torch.cat((x, x.new_zeros(-tokens % together, x.shape[1])))
    own = x.float()
    sums = own.view(len(x), -1, columns_of_run(bits, form)).sum(-1)
    asked = (_together(each, together) for each in (x.view(torch.float32) if pairs else own, sums))
    codes = packed.view(-1, HALF_ROWS).numpy()
    held = scales.view(torch.int16).squeeze(-1).numpy().view(np.uint16)
    out = torch.empty(len(x), len(packed))
    parallel = torch.get_num_threads() > 1
    loop = _product(bits, together, pairs, parallel, form)
    with torch_threads() if parallel else nullcontext():
        loop(*asked, codes, held, out.numpy())
    return out[:tokens].to(x.dtype)


def _together(rows: torch.Tensor, count: int) -> Any:
    """`[tokens / count, columns, count]` of `[tokens, columns]`."""
    return rows.view(-1, count, rows.shape[1]).transpose(1, 2).contiguous().numpy()


@functools.cache
def _product(bits: int, tokens: int, pairs: bool, parallel: bool, form: ScaleForm) -> Any:
    import numba

    run, parts, upper = columns_of_run(bits, form), _PARTS[bits], UPPER_BYTES[bits]
    plain, carried = (run_added(bits, tokens, pairs, last, form) for last in (False, True))
    exponent, ask = np.uint32(23), _asking(run, upper)
    has_powers = form is ScaleForm.NARROW

    def add_block(x: Any, of_runs: Any, codes: Any, scales: Any, total: Any, at: Any) -> None:
        row, top, size, is_first = at
        columns = run * len(of_runs) // parts
        heads = len(scales) - parts * columns // NARROW_GROUP
        for begin in range(0, columns, run):
            for part in range(parts):
                first = part * columns + begin
                if is_first:
                    ask(codes, scales, (row, size, columns), (part, begin), (heads, top))
                if part < QUARTERS - 1:
                    behind = row + columns + begin * upper // HALF_ROWS
                    own = row + first, behind, first, top, heads
                    plain(x, of_runs, codes, scales, total, own)
                else:
                    own = row + begin, columns, first, top, heads
                    carried(x, of_runs, codes, scales, total, own)

    add = compiled_loop(add_block, parallel=False)

    def multiply_blocks(x: Any, of_runs: Any, codes: Any, scales: Any, out: Any) -> None:
        blocks = scales.shape[1] // BLOCK_ROWS
        size = len(codes) // blocks
        for block in numba.prange(blocks):
            top = BLOCK_ROWS * block
            for several in range(len(x)):
                total = np.zeros((tokens, BLOCK_ROWS), np.float32)
                place = size * block, top, size, several == 0
                add(x[several], of_runs[several], codes, scales, total, place)
                for i in range(BLOCK_ROWS):
                    word = np.uint32(scales[0, top + i])
                    power = np.uint32(word << exponent).view(np.float32)
                    if not has_powers:
                        power = np.float32(1)
                    for token in range(tokens):
                        out[several * tokens + token, top + i] = total[token, i] * power

    return compiled_loop(multiply_blocks, parallel)


def _asking(run: int, upper: int) -> Any:
    """Compile the request for the codes of a run `_AHEAD` of that from `begin` on of a part, and
    for the scales that the next block has where this one has those of the run.
    """
    fetch = prefetching()

    def ask(codes: Any, scales: Any, block: Any, place: Any, held: Any) -> None:
        (row, size, columns), (part, begin), (heads, top) = block, place, held
        soon, more = begin + _AHEAD, 0
        if soon >= columns:
            soon, more = soon - columns, size
        if part < QUARTERS - 1:
            for line in range(0, run, 64 // HALF_ROWS):
                fetch(codes, row + more + part * columns + soon + line, 0)
        behind = row + more + columns + soon * upper // HALF_ROWS
        for line in range(0, run * upper // HALF_ROWS, 64 // HALF_ROWS):
            fetch(codes, behind + line, 0)
        group = (part * columns + begin) // NARROW_GROUP + heads
        for line in range(BLOCK_ROWS, 2 * BLOCK_ROWS, 64 // 2):
            fetch(scales, group, top + line)

    return compiled_loop(ask, parallel=False)
