"""Products of a few tokens with codes of 3 and 4 bit and narrow scales, compiled, in the blocks of
64 rows of torch's int4 kernel: that kernel would need scales of 32 bit, and codes of 4.

Codes of a group are multiplied as they are, and its scale and zero once, each for a row without the
row's power of two (`quant.narrow`):

    f * sum over groups of (s * (sum of x * code - half * sum of x) + zero * sum of x)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from quant.narrow import MIDDLE_ZERO, ZERO_STEPS
from quant.numba_loops import compiled_loop, torch_threads
from quant.scheme import NARROW_GROUP

MOST_TOKENS = {3: 4, 4: 2}
"""By bits. More sums than those of four tokens have no room in registers, and the library's kernel,
for which scales are restored, is as fast from three tokens on at 4 bit."""

BLOCK_ROWS = 64
_BYTES = BLOCK_ROWS // 2
"""Bytes of a column of a block: the codes of rows r and r + 32 share one."""

RUNS = {3: 16, 4: NARROW_GROUP}
"""Columns of a run, whose sums stay in registers. At 3 bit a block is three parts of a quarter of
its columns, each with one bit of the codes of the last quarter; groups may reach from one into the
next."""

_QUARTERS = 4
_PARTS = {3: _QUARTERS, 4: 1}


def takes(bits: int, columns: int, tokens: int) -> bool:
    return tokens <= MOST_TOKENS[bits] and columns % (RUNS[bits] * _PARTS[bits]) == 0


def multiply(
    bits: int, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Multiply bfloat16 `x` `[tokens, in]` with a weight of whole blocks: `packed` and `scales` as
    `quant.backends.int4pack` holds them, narrow.
    """
    own = x.float()
    sums = own.view(len(x), -1, RUNS[bits]).sum(-1)
    pairs = packed.view(-1, _BYTES).numpy()
    held = scales.view(torch.int16).squeeze(-1).numpy().view(np.uint16)
    out = torch.empty(len(x), len(packed))
    parallel = torch.get_num_threads() > 1
    loop = _product(bits, len(x), parallel)
    with torch_threads() if parallel else nullcontext():
        loop(own.numpy(), sums.numpy(), pairs, held, out.numpy())
    return out.to(x.dtype)


@functools.cache
def _product(bits: int, tokens: int, parallel: bool) -> Any:
    import numba

    run, parts, half = RUNS[bits], _PARTS[bits], 1 << (bits - 1)
    plain = _run_added(tokens, run, half, _both_nibbles if bits == 4 else _upper_bits)
    carried = _run_added(tokens, run, half, _carried_bits)
    exponent = np.uint32(23)

    def multiply_blocks(x: Any, of_runs: Any, pairs: Any, scales: Any, out: Any) -> None:
        blocks = scales.shape[1] // BLOCK_ROWS
        size, columns = len(pairs) // blocks, x.shape[1] // parts
        for block in numba.prange(blocks):
            top, row = BLOCK_ROWS * block, size * block
            total = np.zeros((tokens, BLOCK_ROWS), np.float32)
            for begin in range(0, columns, run):
                for part in range(parts):
                    first = part * columns + begin
                    if part < _QUARTERS - 1:
                        plain(x, of_runs, pairs, scales, total, (row + first, 0, first, top))
                    else:
                        own = row + begin, columns, first, top
                        carried(x, of_runs, pairs, scales, total, own)
            for i in range(BLOCK_ROWS):
                word = np.uint32(scales[0, top + i])
                power = np.uint32(word << exponent).view(np.float32)
                for token in range(tokens):
                    out[token, top + i] = total[token, i] * power

    return compiled_loop(multiply_blocks, parallel)


_Codes = Callable[[Any, Any], tuple[Any, Any]]
"""Instructions for codes of the first and second half of the rows, from a load of a column."""


def _run_added(tokens: int, run: int, half: int, codes_of: _Codes) -> Any:
    """Compile the products with a run of columns, added to `total` `[tokens, 64]`: of `x` from
    `column` on, whose codes lie from `row` of `pairs` on, or in parts `apart` from there, and with
    the scales of rows from `top` on. It is written out in vectors: numba would keep sums in memory.
    """
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    kinds: Any = types

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = _Vectors(context, builder, signature.args, arguments)
        place = unpack_tuple(builder, arguments[5], 4)
        vectors.add_groups(place, run, half, vectors.sums(place, tokens, run, codes_of))
        return context.get_dummy_value()

    unpack_tuple: Any = cgutils.unpack_tuple  # without annotations
    return intrinsic(
        lambda context, x, of_runs, pairs, scales, total, at: (
            kinds.void(x, of_runs, pairs, scales, total, kinds.UniTuple(kinds.int64, 4)),
            code,
        )
    )


class _Vectors:
    """Instructions with vectors of 16 numbers, for the arguments of `_run_added`'s function."""

    def __init__(self, context: Any, builder: Any, kinds: Any, arguments: Any) -> None:
        from llvmlite import ir

        self._context, self._builder = context, builder
        self._kinds, self._arguments = kinds, arguments
        self._byte, self._short = ir.IntType(8), ir.IntType(16)
        self._number, self._long = ir.IntType(32), ir.IntType(64)
        self._vector, self._constant = ir.VectorType, ir.Constant
        self._lanes, self._whole = (
            ir.VectorType(ir.FloatType(), 16),
            ir.VectorType(self._number, 16),
        )

    def sums(self, place: Any, tokens: int, run: int, codes_of: _Codes) -> list[list[Any]]:
        """Sums of products of each token with the codes of four times 16 rows."""
        builder, (row, apart, column, _) = self._builder, place
        asked = [self._place(0, self._long(token), column) for token in range(tokens)]
        begins = [
            builder.add(row, builder.mul(apart, self._long(part))) for part in range(_QUARTERS - 1)
        ]
        columns = self._vector(self._byte, _BYTES)
        held = [self._pointer(columns, 2, first, self._long(0)) for first in begins]
        sums = [[self._all_of(self._lanes, 0.0)] * 4 for _ in range(tokens)]
        for at in range(run):

            def load(part: int, at: int = at) -> Any:
                return builder.load(builder.gep(held[part], [self._number(at)]), align=1)

            codes = codes_of(builder, load)
            weights = [self._floats(each, rows) for each in codes for rows in (0, 16)]
            for token in range(tokens):
                value = self._spread(builder.gep(asked[token], [self._number(at)]))
                pairs = zip(sums[token], weights, strict=True)
                sums[token] = [self._plus(*each, value) for each in pairs]
        return sums

    def add_groups(self, place: Any, run: int, half: int, sums: list[list[Any]]) -> None:
        """Add to the total what `sums` are under scale and zero of their rows."""
        builder, (_, _, column, top) = self._builder, place
        group = builder.add(builder.udiv(column, self._long(NARROW_GROUP)), self._long(1))
        of_run = [
            self._spread(self._place(1, self._long(token), builder.udiv(column, self._long(run))))
            for token in range(len(sums))
        ]
        for i in range(4):
            first = self._long(16 * i)
            scale, zero = self._scale_and_zero(group, builder.add(top, first), half)
            for token, own in enumerate(sums):
                out = self._pointer(self._lanes, 4, self._long(token), first)
                added = self._plus(builder.load(out, align=4), scale, own[i])
                builder.store(self._plus(added, zero, of_run[token]), out, align=4)

    def _scale_and_zero(self, group: Any, rows: Any, half: int) -> tuple[Any, Any]:
        """Of 16 rows, without their powers of two; the zero is the value of code 0."""
        builder, lanes, whole = self._builder, self._lanes, self._whole
        narrow = self._pointer(self._vector(self._short, 16), 3, group, rows)
        both = builder.zext(builder.load(narrow, align=2), whole)
        scale = builder.sitofp(builder.and_(both, self._all_of(whole, 255)), lanes)
        steps = builder.sitofp(builder.lshr(both, self._all_of(whole, 8)), lanes)
        steps = builder.fmul(steps, self._all_of(lanes, 1 / ZERO_STEPS))
        steps = builder.fsub(steps, self._all_of(lanes, MIDDLE_ZERO / ZERO_STEPS))
        zero = builder.bitcast(builder.fmul(steps, scale), whole)
        zero = builder.bitcast(builder.and_(zero, self._all_of(whole, 0xFFFF0000)), lanes)
        return scale, self._plus(zero, scale, self._all_of(lanes, -float(half)))

    def _all_of(self, kind: Any, value: float) -> Any:
        return self._constant(kind, [value] * 16)

    def _place(self, index: int, *at: Any) -> Any:
        from numba.core import cgutils

        helpers: Any = cgutils  # without annotations
        kind = self._kinds[index]
        held = self._context.make_array(kind)(self._context, self._builder, self._arguments[index])
        return helpers.get_item_pointer(
            self._context, self._builder, kind, held, at, wraparound=False
        )

    def _pointer(self, kind: Any, *at: Any) -> Any:
        return self._builder.bitcast(self._place(*at), kind.as_pointer())

    def _spread(self, pointer: Any) -> Any:
        """Give the number at `pointer` to all lanes."""
        builder, undefined = self._builder, self._constant(self._lanes, None)
        one = builder.insert_element(undefined, builder.load(pointer), self._number(0))
        return builder.shuffle_vector(one, one, self._all_of(self._whole, 0))

    def _floats(self, codes: Any, rows: int) -> Any:
        builder, order = self._builder, self._whole(list(range(rows, rows + 16)))
        own = builder.shuffle_vector(codes, codes, order)
        return builder.sitofp(builder.zext(own, self._whole), self._lanes)

    def _plus(self, total: Any, one: Any, other: Any) -> Any:
        flags = ("contract", "reassoc", "nsz")
        product = self._builder.fmul(one, other, flags=flags)
        return self._builder.fadd(total, product, flags=flags)


def _bytes(builder: Any, operation: str, value: Any, number: int) -> Any:
    return getattr(builder, operation)(value, value.type([number] * _BYTES))


def _both_nibbles(builder: Any, load: Any) -> tuple[Any, Any]:
    own = load(0)
    return _bytes(builder, "and_", own, 15), _bytes(builder, "lshr", own, 4)


def _upper_bits(builder: Any, load: Any) -> tuple[Any, Any]:
    """Of each nibble, whose lowest bit is of another column."""
    own = load(0)
    low, high = (_bytes(builder, "lshr", own, shift) for shift in (1, 5))
    return _bytes(builder, "and_", low, 7), high


def _carried_bits(builder: Any, load: Any) -> tuple[Any, Any]:
    """The lowest bits of the nibbles of three parts, the highest first."""
    joined = _bytes(builder, "and_", load(0), 0x11)
    for part in (1, 2):
        own = _bytes(builder, "and_", load(part), 0x11)
        joined = builder.or_(_bytes(builder, "shl", joined, 1), own)
    return _both_nibbles(builder, lambda part: joined)
