"""Compiled loops over 4-bit codes, eight at a time: a word of 32 bits with eight codes becomes one
of 64 bits with a byte for each, and eight such words are turned where rows and columns change
places. They take a quarter of the time of torch's passes, which write numbers of 32 bits between.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch

from quant.devices import ranges
from quant.numba_loops import compiled_loop, has_numba

CODES = 8
"""Codes of a word, and words that are turned together."""

_LEAST = 1 << 22
"""Codes of a weight from which its loops are worth a second of compiling, for the many alike."""

_LINE = 8
"""Words of 64 bits that a core writes to memory at once."""

_TILE = 32
"""Words of 32 bits that it reads at once."""

_LOW, _HIGH = np.uint64(0xFFFF), np.uint64(16)


def is_compiled(weights: int) -> bool:
    return weights >= _LEAST and has_numba()


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 `[rows, 8 n]` of int32 `[rows, n]`, codes in order from the lowest bits on; rows
    may lie along the columns in memory.
    """
    if words.is_contiguous():
        return _filled(_by_rows(), words, len(words), len(words))
    stored = words.t().contiguous()
    return _filled(_by_columns(), stored, len(words), len(words))


def unpacked_awq(words: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 `[out, in]` of AutoAWQ's int32 `[in, out / 8]`; `in` has to be whole eights."""
    return _filled(_of_awq(), words.contiguous(), words.shape[1] * CODES, words.shape[1])


def in_parts(loop: Callable[..., None], count: int, *arrays: Any) -> None:
    """Call `loop(first, end, *arrays)` for parts of `count` on as many threads as torch has."""
    threads = torch.get_num_threads()
    parts = list(ranges(count, max(_TILE, -(-count // threads))))
    if len(parts) < 2:
        loop(0, count, *arrays)
        return
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(lambda part: loop(part.start, part.stop, *arrays), parts))


def _filled(loop: Callable[..., None], words: torch.Tensor, rows: int, count: int) -> torch.Tensor:
    codes = np.empty((rows, words.numel() // rows), np.uint64)  # in large pages, as torch's are not
    in_parts(loop, count, words.numpy().view(np.uint32), codes)
    return torch.from_numpy(codes.view(np.uint8))


@cache
def _by_rows() -> Any:
    spread = _spreading()

    def unpack(first: int, end: int, words: Any, codes: Any) -> None:
        for row in range(first, end):
            for place in range(words.shape[1]):
                codes[row, place] = spread(words[row, place])

    return compiled_loop(unpack, parallel=False, exact=True)


@cache
def _by_columns() -> Any:
    spread = _spreading()

    def unpack(first: int, end: int, words: Any, codes: Any) -> None:
        for tile in range(first, end, _TILE):
            rows = range(tile, min(tile + _TILE, end))
            for line in range(0, len(words), _LINE):
                for row in rows:
                    for place in range(line, min(line + _LINE, len(words))):
                        codes[row, place] = spread(words[place, row])

    return compiled_loop(unpack, parallel=False, exact=True)


@cache
def _spreading() -> Any:
    fine, half, whole = (
        np.uint64(each) for each in (0x0F0F0F0F0F0F0F0F, 0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF)
    )
    four, eight, sixteen = np.uint64(4), np.uint64(8), np.uint64(16)

    def spread(word: Any) -> Any:
        codes = np.uint64(word)
        codes = (codes | (codes << sixteen)) & whole
        codes = (codes | (codes << eight)) & half
        return (codes | (codes << four)) & fine

    return compiled_loop(spread, parallel=False, exact=True)


@cache
def _of_awq() -> Any:
    """The codes of the even ones of eight outputs are in the lower half of a word, then the odd."""
    turn = turning()
    wide, fine = np.uint64(0x000000FF000000FF), np.uint64(0x000F000F000F000F)
    twelve, twenty_four, eight = np.uint64(12), np.uint64(24), np.uint64(8)

    def spread_half(codes: Any) -> Any:
        codes = (codes | (codes << twenty_four)) & wide
        return (codes | (codes << twelve)) & fine

    spread_half = compiled_loop(spread_half, parallel=False, exact=True)

    def unpack(first: int, end: int, words: Any, codes: Any) -> None:
        eights = np.empty(CODES, np.uint64)
        for tile in range(first, end, _TILE):
            outputs = range(tile, min(tile + _TILE, end))
            for line in range(0, codes.shape[1], _LINE):
                places = range(line, min(line + _LINE, codes.shape[1]))
                for output in outputs:
                    for place in places:
                        for i in range(CODES):
                            word = np.uint64(words[CODES * place + i, output])
                            odd = spread_half(word >> _HIGH)
                            eights[i] = spread_half(word & _LOW) | (odd << eight)
                        turn(eights)
                        for i in range(CODES):
                            codes[CODES * output + i, place] = eights[i]

    return compiled_loop(unpack, parallel=False, exact=True)


@cache
def turning() -> Any:
    """Compile `turn(eights)` of uint64 `[8]`: byte i of word j becomes byte j of word i."""
    masks = np.array([0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF, 0x00000000FFFFFFFF], np.uint64)

    def turn(eights: Any) -> None:
        for step in range(3):
            apart, mask = 1 << step, masks[step]
            shift = np.uint64(8 * apart)
            for i in range(CODES):
                if not i & apart:
                    low, high = eights[i], eights[i + apart]
                    other = ((low >> shift) ^ high) & mask
                    eights[i], eights[i + apart] = low ^ (other << shift), high ^ other

    return compiled_loop(turn, parallel=False, exact=True)
