"""Products with bfloat16 weights whose numbers become float32 as they are read: on CPUs whose
libraries have no units for bfloat16, where PyTorch multiplies number by number, and of many inputs
on those that multiply float32 faster.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quant.backends.base import ThreadWords, content_of, linear_by_blocks
from quant.devices import emulates, ranges
from quant.numba_loops import as_array, compiled_loop, has_numba, narrowing, torch_threads, widening

_MANY_TOKENS = 32
"""Inputs from which a library's float32 product of restored blocks is faster than the loop (1024 to
4096 columns, an EPYC with AVX2)."""

_DEPTH, _APART = 1024, 16
"""Numbers of a row that are summed at once: four rows of them fit in the first cache. They lie a
cache line further apart, as powers of two would share their places in it."""

_ROWS = 16
"""Rows of the weight that are a thread's next task, for which inputs stay in the second cache."""


def is_known(weight: Tensor) -> bool:
    """Whether `multiply` is the way to multiply with a 16-bit `weight` here."""
    is_slow = weight.dtype == torch.bfloat16 and emulates(weight.dtype, weight.device)
    return is_slow and has_numba()


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product of `x` `[..., in]` and `weight` `[out, in]`, plus `bias` `[out]`, summed in
    float32 and rounded once if there are few inputs.
    """
    tokens, rows = x.reshape(-1, x.shape[-1]), len(weight)
    if len(tokens) >= _MANY_TOKENS:
        out = linear_by_blocks(tokens, rows, weight.__getitem__)
        return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], rows)
    out = tokens.new_empty(len(tokens), rows)
    added = tokens.new_zeros(rows) if bias is None else bias.detach()
    with torch_threads():
        loop = _product(torch.get_num_threads() > 1)
        arrays = (as_array(each) for each in (tokens.contiguous(), weight, added, out))
        loop(*arrays)
    return out.view(*x.shape[:-1], rows)


def warm_up() -> None:
    """Compile the loop."""
    multiply(*(torch.zeros(1, 1, dtype=torch.bfloat16) for _ in range(2)))


_PANEL = 64
"""Rows of a weight that oneDNN lays side by side, pairs of columns after each other."""

_PANELS = 8
"""Panels for one product: restored, 1 to 5 MB of them stay in the second cache or the third."""


def multiply_panels(x: Tensor, packed: Tensor, rows: int, bias: Tensor | None = None) -> Tensor:
    """The product of `x` `[tokens, in]` and a weight `[rows, in]` that `lies_in_panels`, plus
    `bias` `[rows]`, summed in float32 and rounded once.
    """
    columns, tokens = x.shape[1], x.float()
    words = content_of(packed).view(torch.int32).view(-1, columns // 2, _PANEL)
    out = x.new_empty(len(x), rows)
    for block in ranges(len(words), _PANELS):
        own = words[block]
        restored = _memory.words(2 * own.numel()).view(columns // 2, 2, len(own), _PANEL)
        even, odd = restored.permute(1, 2, 0, 3)
        torch.bitwise_left_shift(own, 16, out=even)  # a float32 begins with the bfloat16
        torch.bitwise_and(own, -1 << 16, out=odd)
        sums = tokens @ restored.view(torch.float32).view(columns, -1)
        place = slice(block.start * _PANEL, block.stop * _PANEL)
        out[:, place] = sums if bias is None else sums.add_(bias[place])
    return out


_memory = ThreadWords()


@cache
def lies_in_panels(rows: int, columns: int) -> bool:
    """Whether oneDNN lays a bfloat16 weight `[rows, columns]` out in panels of `_PANEL` rows."""
    if rows % _PANEL or columns % 2:
        return False
    marks = (torch.arange(rows * columns) % _MARKS).to(torch.int16).view(rows, columns)
    packed = torch.ops.mkldnn._reorder_linear_weight(marks.view(torch.bfloat16), None)
    found = content_of(packed).view(torch.int16)
    panels = marks.view(-1, _PANEL, columns // 2, 2).permute(0, 2, 1, 3)
    return torch.equal(found, panels.reshape(-1))


_MARKS = 16127
"""So many bit patterns are numbers; a prime, so that rows and panels differ."""


@cache
def _product(parallel: bool) -> Any:
    """The compiled loop over `x` `[tokens, in]`, `weight` `[out, in]`, `added` `[out]` and `out`
    `[tokens, out]`, all of bfloat16.

    Twelve sums at once, of four rows and three tokens, stay in vector registers, and each number
    that is loaded is used three or four times.
    """
    import numba

    widen, narrow = widening(torch.bfloat16), narrowing(torch.bfloat16)
    three, one = _sums_of_three(), _sums_of_one()

    def multiply_rows(x: Any, weight: Any, added: Any, out: Any) -> None:
        tokens, columns = x.shape
        rows, whole = len(weight), tokens - tokens % 3
        pieces = (columns + _DEPTH - 1) // _DEPTH
        asked = np.empty((pieces, tokens, _DEPTH + _APART), np.float32)
        for piece in range(pieces):
            for token in range(tokens):
                numbers = x[token, piece * _DEPTH : (piece + 1) * _DEPTH]
                for i in range(len(numbers)):
                    asked[piece, token, i] = widen(numbers[i])
        for task in numba.prange((rows + _ROWS - 1) // _ROWS):
            first = task * _ROWS
            own = min(_ROWS, rows - first)
            held = np.empty((4, _DEPTH + _APART), np.float32)
            sums = np.zeros((tokens, _ROWS), np.float32)
            for piece in range(pieces):
                begin = piece * _DEPTH
                count = min(_DEPTH, columns - begin)
                for four in range(0, own, 4):
                    for row in range(4):  # beyond the last one, that again
                        place = min(first + four + row, rows - 1)
                        numbers, wide = weight[place, begin : begin + count], held[row]
                        for i in range(count):
                            wide[i] = widen(numbers[i])
                    for token in range(0, whole, 3):
                        three(held, asked[piece, token : token + 3], count, sums[token:], four)
                    for token in range(whole, tokens):
                        one(held, asked[piece, token], count, sums[token], four)
            for token in range(tokens):
                for row in range(own):
                    total = sums[token, row] + widen(added[first + row])
                    out[token, first + row] = narrow(total)

    return compiled_loop(multiply_rows, parallel)


@cache
def _adding() -> Any:
    def add(sums: Any, at: int, own: tuple[Any, Any, Any, Any]) -> None:
        for row in range(4):
            sums[at + row] += own[row]

    return compiled_loop(add, parallel=False)


def _sums_of_three() -> Any:
    add = _adding()

    def three(held: Any, asked: Any, count: int, sums: Any, at: int) -> None:
        w0, w1, w2, w3 = held[0], held[1], held[2], held[3]
        x0, x1, x2 = asked[0], asked[1], asked[2]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = np.float32(0)
        for i in range(count):
            p, q, r, s = w0[i], w1[i], w2[i], w3[i]
            a, b, c = x0[i], x1[i], x2[i]
            a0, a1, a2, a3 = a0 + p * a, a1 + q * a, a2 + r * a, a3 + s * a
            b0, b1, b2, b3 = b0 + p * b, b1 + q * b, b2 + r * b, b3 + s * b
            c0, c1, c2, c3 = c0 + p * c, c1 + q * c, c2 + r * c, c3 + s * c
        add(sums[0], at, (a0, a1, a2, a3))
        add(sums[1], at, (b0, b1, b2, b3))
        add(sums[2], at, (c0, c1, c2, c3))

    return compiled_loop(three, parallel=False)


def _sums_of_one() -> Any:
    add = _adding()

    def one(held: Any, asked: Any, count: int, sums: Any, at: int) -> None:
        w0, w1, w2, w3 = held[0], held[1], held[2], held[3]
        a0 = a1 = a2 = a3 = np.float32(0)
        for i in range(count):
            a = asked[i]
            a0, a1, a2, a3 = a0 + w0[i] * a, a1 + w1[i] * a, a2 + w2[i] * a, a3 + w3[i] * a
        add(sums, at, (a0, a1, a2, a3))

    return compiled_loop(one, parallel=False)
