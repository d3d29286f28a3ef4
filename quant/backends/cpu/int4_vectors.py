"""Products of a run of columns, written out in vectors of 16 rows for
`quant.backends.cpu.int4_few`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quant.backends.cpu.upper_bits import HALF_ROWS, UPPER_BYTES
from quant.narrow import MIDDLE_ZERO, zero_steps
from quant.scheme import NARROW_GROUP, SUPER_BLOCK, ScaleForm

_LANES, _NIBBLE = 16, 4
_ROWS_OF_WORDS = (0, 32, 16, 48)
"""The first rows of what `Vectors` makes of a column's 32 bytes, 16 each for both nibbles."""

DECODED = 4
"""Columns that are decoded at once: the upper bits of so many fill whole lengths of 32 bytes."""


def most_of_all_rows() -> int:
    """Most tokens of which all rows' sums are in registers, of which AVX2 has half as many of half
    the width.
    """
    return 4 if has_wide_vectors() else 1


def has_wide_vectors() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


RUNS = {3: 16, 4: NARROW_GROUP, 5: NARROW_GROUP, 6: NARROW_GROUP}
"""Columns of a run, whose sums stay in registers. At 3 bit a block is three parts of a quarter of
its columns, each with one bit of the codes of the last quarter; groups may reach from one into the
next."""

QUARTERS = 4

_BIAS = 128
"""Becomes 128 + code where a code of at most 7 bits takes the mantissa of bfloat16."""
_BIAS_BITS = 0x43004300

_Codes = Callable[[Any, Any], tuple[Any, int, int]]
"""Instructions for bytes that have codes in their nibbles, from `load(part)` of columns' bytes; how
far the codes have to be moved down, and their mask."""


def columns_of_run(bits: int, form: ScaleForm) -> int:
    """Columns of a run, of which none has two scales."""
    return RUNS[bits] // 2 if form is ScaleForm.SUPER_BLOCKS and bits == 6 else RUNS[bits]


def run_added(bits: int, tokens: int, pairs: bool, carried: bool, form: ScaleForm) -> Any:
    """Compile the products with a run of columns, added to `total` `[tokens, 64]`: of `x` `[in,
    tokens]`, or `[in / 2, tokens]` of pairs, from `column` on, whose codes lie from `row` of
    `codes` on and upper bits from the next place on, or in parts so far `apart`, and with the
    scales of rows from `top` on, which stand behind so many `heads`. It is written out in vectors:
    numba would keep sums in memory.
    """
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    kinds: Any = types
    plain = _both_nibbles if bits >= _NIBBLE else _highest_bits
    codes_of = _carried_bits if carried else plain
    together = ((0, 1),) if tokens <= most_of_all_rows() else ((0,), (1,))

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = Vectors(context, builder, signature.args, arguments, pairs, form)
        *place, heads = unpack_tuple(builder, arguments[5], 5)
        for halves in together:
            sums = vectors.sums(place, (tokens, bits), halves, codes_of)
            vectors.add_groups(place, heads, bits, halves, sums)
        return context.get_dummy_value()

    unpack_tuple: Any = cgutils.unpack_tuple  # without annotations
    return intrinsic(
        lambda context, x, of_runs, codes, scales, total, at: (
            kinds.void(x, of_runs, codes, scales, total, kinds.UniTuple(kinds.int64, 5)),
            code,
        )
    )


def columns_decoded(bits: int) -> Any:
    """Compile the decoding of `DECODED` columns of 4 to 6 bit, whose codes lie from `row` of
    `codes` on and upper bits from `behind` on, under steps and zeros float32 `[64]` of their rows,
    to `weight` `[in, rows]` from `column` and `top` on: float32, or bfloat16 rounded as torch does.
    """
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    kinds: Any = types

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = Vectors(context, builder, signature.args, arguments, pairs=False)
        vectors.decode(unpack_tuple(builder, arguments[4], 4), bits)
        return context.get_dummy_value()

    unpack_tuple: Any = cgutils.unpack_tuple  # without annotations
    return intrinsic(
        lambda context, steps, zeros, codes, weight, at: (
            kinds.void(steps, zeros, codes, weight, kinds.UniTuple(kinds.int64, 4)),
            code,
        )
    )


class Vectors:
    """Instructions with vectors of 16 numbers, for the arguments of the functions above."""

    def __init__(
        self,
        context: Any,
        builder: Any,
        kinds: Any,
        arguments: Any,
        pairs: bool,
        form: ScaleForm = ScaleForm.PAIRS,
    ) -> None:
        from llvmlite import ir

        self._form, self._half, self._bit = form, ir.HalfType(), ir.IntType(1)
        self._context, self._builder = context, builder
        self._kinds, self._arguments = kinds, arguments
        self._step = 2 if pairs else 1
        self._byte, self._short = ir.IntType(8), ir.IntType(16)
        self._number, self._long = ir.IntType(32), ir.IntType(64)
        self._vector, self._constant = ir.VectorType, ir.Constant
        self._lanes = ir.VectorType(ir.FloatType(), _LANES)
        self._whole = ir.VectorType(self._number, _LANES)
        number = ir.FloatType().as_pointer()
        self._kind = ir.FunctionType(self._lanes, [self._whole, number, self._lanes])

    def sums(
        self, place: Any, size: tuple[int, int], halves: tuple[int, ...], codes_of: _Codes
    ) -> list[list[Any]]:
        """Sums of products of each token with the codes of 32 rows for each of `halves`."""
        builder, (row, apart, column, _), (tokens, bits) = self._builder, place, size
        first = builder.udiv(column, self._long(self._step))
        asked = self._place(0, first, self._long(0))
        begins = [
            builder.add(row, builder.mul(apart, self._long(part))) for part in range(QUARTERS - 1)
        ]
        bytes_ = self._vector(self._number, HALF_ROWS * self._step // 4)
        held = [self._pointer(bytes_, 2, first, self._long(0)) for first in begins]
        sums = [[self._all_of(self._lanes, 0.0)] * (2 * len(halves)) for _ in range(tokens)]
        for at in range(columns_of_run(bits, self._form) // self._step):

            def load(part: int, at: int = at) -> Any:
                return builder.load(builder.gep(held[part], [self._number(at)]), align=1)

            words = self._words(halves, *codes_of(builder, load))
            if UPPER_BYTES[bits]:
                upper = self._upper(apart, at, bits - 4, halves)
                words = [builder.or_(*both) for both in zip(words, upper, strict=True)]
            weights = [self._factor(each) for each in words]
            for token in range(tokens):
                value = asked, tokens * at + token
                pairs = zip(sums[token], weights, strict=True)
                sums[token] = [self._added(*each, value) for each in pairs]
        return sums

    def decode(self, place: Any, bits: int) -> None:
        builder, (row, behind, column, top) = self._builder, place
        held = self._pointer(self._vector(self._number, HALF_ROWS // 4), 2, row, self._long(0))
        affine = []
        for rows in _ROWS_OF_WORDS:
            both = (self._pointer(self._lanes, part, self._long(rows)) for part in (0, 1))
            affine.append([builder.load(each, align=4) for each in both])
        for at in range(DECODED):
            bytes_ = builder.load(builder.gep(held, [self._number(at)]), align=1)
            words = self._words((0, 1), *_both_nibbles(builder, lambda _, own=bytes_: own))
            if UPPER_BYTES[bits]:
                upper = self._upper(behind, at, bits - 4, (0, 1))
                words = [builder.or_(*both) for both in zip(words, upper, strict=True)]
            for rows, codes, (step, zero) in zip(_ROWS_OF_WORDS, words, affine, strict=True):
                own = builder.add(column, self._long(at)), builder.add(top, self._long(rows))
                value = builder.fadd(builder.fmul(self._factor(codes), step), zero)
                if self._kinds[3].dtype.bitwidth < 32:
                    value = self._rounded(value)
                builder.store(value, self._pointer(value.type, 3, *own), align=2)

    def _rounded(self, values: Any) -> Any:
        """The bits of the nearest numbers of bfloat16, of a tie the even ones."""
        builder, whole = self._builder, self._whole
        words = builder.bitcast(values, whole)
        half = self._all_of(whole, 16)
        odd = builder.and_(builder.lshr(words, half), self._all_of(whole, 1))
        words = builder.add(builder.add(words, self._all_of(whole, 0x7FFF)), odd)
        return builder.trunc(builder.lshr(words, half), self._vector(self._short, _LANES))

    def _words(self, halves: tuple[int, ...], held: Any, shift: int, mask: int) -> list[Any]:
        """Codes of 16 rows each from the bytes of a column, or two columns' in halves of words."""
        builder, order = self._builder, range(_LANES)
        bytes_ = builder.bitcast(held, self._vector(self._byte, HALF_ROWS * self._step))
        if self._step > 1:
            places = [HALF_ROWS * c + _LANES * h + i for i in order for c in (0, 1) for h in (0, 1)]
            both = self._shuffled(bytes_, places)
            both = builder.bitcast(both, self._whole)
            mask |= mask << 16
        words = []
        for half in halves:
            if self._step == 1:
                own = self._shuffled(bytes_, [_LANES * half + i for i in order])
                own, moved = builder.zext(own, self._whole), shift
            else:
                own, moved = both, shift + 8 * half
            for down in (moved, moved + 4):
                each = builder.lshr(own, self._all_of(self._whole, down)) if down else own
                words.append(builder.and_(each, self._all_of(self._whole, mask)))
        return words

    def _upper(self, row: Any, at: int, count: int, halves: tuple[int, ...]) -> list[Any]:
        """The upper bits, `count` of each code, that belong to `_words`."""
        builder, place = self._builder, at * self._step // 2
        width = _LANES * count
        held = self._pointer(self._vector(self._byte, width), 2, row, self._long(0))
        bytes_ = builder.load(builder.gep(held, [self._number(place)]), align=1)
        first = 0 if self._step > 1 else at % 2
        if count == 1:
            words, first = builder.zext(bytes_, self._whole), 4 * first
            if self._step > 1:
                words = builder.or_(words, builder.shl(words, self._all_of(self._whole, 12)))
        elif self._step > 1:
            pairs = builder.zext(bytes_, self._vector(self._short, width))
            words, first = builder.bitcast(pairs, self._whole), 0
        else:
            own = self._shuffled(bytes_, list(range(first, width, 2)))
            words, first = builder.zext(own, self._whole), 0
        mask = ((1 << count) - 1) << 4
        mask |= mask << 16 if self._step > 1 else 0
        moved = []
        for rows in (half + 2 * nibble for half in halves for nibble in (0, 1)):
            up = 4 - first - count * rows
            shift = self._all_of(self._whole, abs(up))
            each = (builder.shl if up > 0 else builder.lshr)(words, shift) if up else words
            moved.append(builder.and_(each, self._all_of(self._whole, mask)))
        return moved

    def _shuffled(self, bytes_: Any, places: list[int]) -> Any:
        order = self._constant(self._vector(self._number, len(places)), places)
        return self._builder.shuffle_vector(bytes_, bytes_, order)

    def _factor(self, codes: Any) -> Any:
        """What is multiplied: a number, or 128 + code in bfloat16 for two columns."""
        if self._step == 1:
            return self._builder.sitofp(codes, self._lanes)
        return self._builder.or_(codes, self._all_of(self._whole, _BIAS_BITS))

    def _added(self, total: Any, factor: Any, value: tuple[Any, int]) -> Any:
        """Add the product with a number, or two, at a distance from a pointer."""
        pointer, distance = value
        if self._step == 1:
            place = self._builder.gep(pointer, [self._number(distance)])
            return self._plus(total, factor, self._spread(place))
        return self._builder.asm(
            self._kind, f"vdpbf16ps {4 * distance}($2){{1to16}}, $1, $0", "=v,v,r,0",
            [factor, pointer, total], False,
        )  # fmt: skip

    def add_groups(
        self, place: Any, heads: Any, bits: int, halves: tuple[int, ...], sums: list[list[Any]]
    ) -> None:
        """Add to the total what `sums` are under scale and zero of their rows."""
        builder, (_, _, column, top) = self._builder, place
        group = builder.add(builder.udiv(column, self._long(NARROW_GROUP)), heads)
        run = builder.udiv(column, self._long(columns_of_run(bits, self._form)))
        of_run = [self._spread(self._place(1, run, self._long(t))) for t in range(len(sums))]
        bias = 0 if self._step == 1 else _BIAS
        for number, low in enumerate(_ROWS_OF_WORDS[2 * halves[0] :][: len(sums[0])]):
            first = self._long(low)
            rows = builder.add(top, first)
            if self._form is ScaleForm.NARROW:
                half = 1 << (bits - 1)
                scale, zero = self._scale_and_zero(group, rows, half + bias, zero_steps(bits))
            else:
                scale, zero = self._of_super_block(column, group, rows, bits, bias)
            for token, own in enumerate(sums):
                out = self._pointer(self._lanes, 4, self._long(token), first)
                added = self._plus(builder.load(out, align=4), scale, own[number])
                builder.store(self._plus(added, zero, of_run[token]), out, align=4)

    def _scale_and_zero(self, group: Any, rows: Any, half: int, parts: int) -> tuple[Any, Any]:
        """Of 16 rows, without their powers of two; the zero is that of code -`half`."""
        builder, lanes, whole = self._builder, self._lanes, self._whole
        both = builder.zext(self._shorts(group, rows), whole)
        scale = builder.sitofp(builder.and_(both, self._all_of(whole, 255)), lanes)
        steps = builder.sitofp(builder.lshr(both, self._all_of(whole, 8)), lanes)
        steps = builder.fmul(steps, self._all_of(lanes, 1 / parts))
        steps = builder.fsub(steps, self._all_of(lanes, MIDDLE_ZERO / parts))
        zero = builder.bitcast(builder.fmul(steps, scale), whole)
        zero = builder.bitcast(builder.and_(zero, self._all_of(whole, 0xFFFF0000)), lanes)
        return scale, self._plus(zero, scale, self._all_of(lanes, -float(half)))

    def _of_super_block(
        self, column: Any, group: Any, rows: Any, bits: int, bias: int
    ) -> tuple[Any, Any]:
        """Of 16 rows, the scale and the value of code -`bias`."""
        builder, lanes, whole = self._builder, self._lanes, self._whole
        block = builder.udiv(column, self._long(SUPER_BLOCK))
        both = self._shorts(group, rows)
        if bits == 6:
            byte = self._all_of(both.type, 8)
            is_second = builder.trunc(builder.lshr(column, self._long(4)), self._bit)
            lower = builder.select(is_second, both, builder.shl(both, byte))
            both = builder.ashr(lower, byte)
            factor = builder.sitofp(builder.sext(both, whole), lanes)
            scale = builder.fmul(self._halves(block, rows), factor)
            return scale, builder.fmul(scale, self._all_of(lanes, -float(32 + bias)))
        first, words = builder.mul(block, self._long(2)), builder.zext(both, whole)
        byte, eight = self._all_of(whole, 255), self._all_of(whole, 8)
        factors = builder.and_(words, byte), builder.lshr(words, eight)
        heads = self._halves(first, rows), self._halves(builder.add(first, self._long(1)), rows)
        scale, low = (
            builder.fmul(head, builder.sitofp(factor, lanes))
            for head, factor in zip(heads, factors, strict=True)
        )
        low = builder.fneg(low)
        return scale, self._plus(low, scale, self._all_of(lanes, -float(bias))) if bias else low

    def _shorts(self, *at: Any) -> Any:
        """Pairs of bytes of 16 rows."""
        held = self._pointer(self._vector(self._short, _LANES), 3, *at)
        return self._builder.load(held, align=2)

    def _halves(self, *at: Any) -> Any:
        """Numbers of float16 of 16 rows."""
        held = self._builder.bitcast(self._shorts(*at), self._vector(self._half, _LANES))
        return self._builder.fpext(held, self._lanes)

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

    def _plus(self, total: Any, one: Any, other: Any) -> Any:
        flags = ("contract", "reassoc", "nsz")
        product = self._builder.fmul(one, other, flags=flags)
        return self._builder.fadd(total, product, flags=flags)


def _both_nibbles(builder: Any, load: Any) -> tuple[Any, int, int]:
    return load(0), 0, 15


def _highest_bits(builder: Any, load: Any) -> tuple[Any, int, int]:
    """Of each nibble, whose lowest bit is of another column."""
    return load(0), 1, 7


def _carried_bits(builder: Any, load: Any) -> tuple[Any, int, int]:
    """The lowest bits of the nibbles of three parts, the highest first."""
    held = [load(part) for part in range(QUARTERS - 1)]
    all_of: Any = held[0].type
    lowest = all_of([0x11111111] * all_of.count)
    joined = builder.and_(held[0], lowest)
    for own in held[1:]:
        doubled = builder.shl(joined, all_of([1] * all_of.count))
        joined = builder.or_(doubled, builder.and_(own, lowest))
    return joined, 0, 15
