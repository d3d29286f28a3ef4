"""Products of a few tokens with codes of 3 and 4 bit and narrow scales, compiled, in the blocks of
64 rows of torch's int4 kernel: that kernel would need scales of 32 bit, and codes of 4.

Codes of a group are multiplied as they are, and its scale and zero once, each for a row without the
row's power of two (`quant.narrow`):

    f * sum over groups of (s * (sum of x * code - half * sum of x) + zero * sum of x)

Where the CPU multiplies pairs of bfloat16 numbers, a code becomes one by standing in the mantissa
of 128 + code, and 128 is subtracted with `half`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from quant.devices import local_processor
from quant.narrow import MIDDLE_ZERO, ZERO_STEPS
from quant.numba_loops import compiled_loop, prefetching, torch_threads
from quant.scheme import NARROW_GROUP

AT_ONCE = (1, 2, 4, 8)
"""Tokens whose sums are in registers: of eight, those of half of the rows at a time."""

BLOCK_ROWS = 64
_BYTES = BLOCK_ROWS // 2
"""Bytes of a column of a block: the codes of rows r and r + 32 share one."""

_LANES = 16
_ALL_ROWS = 4
"""Most tokens of which all rows' sums are in registers."""

RUNS = {3: 16, 4: NARROW_GROUP}
"""Columns of a run, whose sums stay in registers. At 3 bit a block is three parts of a quarter of
its columns, each with one bit of the codes of the last quarter; groups may reach from one into the
next."""

_QUARTERS = 4
_PARTS = {3: _QUARTERS, 4: 1}

_AHEAD = 256
"""Columns by which codes are asked of memory before they are used, and scales a block before: a
product of one token takes two thirds of the time at 4 bit, and a third at 3 bit, where parts
and rows of scales are too many places for the CPU to foresee."""

_BIAS = 128
"""Becomes 128 + code where a code of at most 7 bits takes the mantissa of bfloat16."""
_BIAS_BITS = 0x43004300


_MOST_TOKENS, _MOST_OF_PAIRS = 31, 63
"""Beyond, a product with decoded rows takes less time: 4096 x 4096 at 4 bit on one core of an AMD
EPYC (Zen 5), with products of pairs, 6.3 ms in both ways for 64 tokens."""


def takes(bits: int, columns: int, tokens: int) -> bool:
    whole_runs = columns % (RUNS[bits] * _PARTS[bits]) == 0
    return whole_runs and tokens <= (_MOST_OF_PAIRS if multiplies_pairs() else _MOST_TOKENS)


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
    `quant.backends.int4pack` holds them, narrow.
    """
    tokens, pairs = len(x), multiplies_pairs()
    at_once = next((each for each in AT_ONCE if tokens <= each), AT_ONCE[-1])
    if tokens % at_once:
        x = torch.cat((x, x.new_zeros(-tokens % at_once, x.shape[1])))
    own = x.float()
    sums = own.view(len(x), -1, RUNS[bits]).sum(-1)
    asked = (_together(each, at_once) for each in (x.view(torch.float32) if pairs else own, sums))
    codes = packed.view(-1, _BYTES).numpy()
    held = scales.view(torch.int16).squeeze(-1).numpy().view(np.uint16)
    out = torch.empty(len(x), len(packed))
    parallel = torch.get_num_threads() > 1
    loop = _product(bits, at_once, pairs, parallel)
    with torch_threads() if parallel else nullcontext():
        loop(*asked, codes, held, out.numpy())
    return out[:tokens].to(x.dtype)


def _together(rows: torch.Tensor, count: int) -> Any:
    """`[tokens / count, columns, count]` of `[tokens, columns]`."""
    return rows.view(-1, count, rows.shape[1]).transpose(1, 2).contiguous().numpy()


@functools.cache
def _product(bits: int, tokens: int, pairs: bool, parallel: bool) -> Any:
    import numba

    run, parts = RUNS[bits], _PARTS[bits]
    plain = _run_added(bits, tokens, pairs, _both_nibbles if bits == 4 else _upper_bits)
    carried = _run_added(bits, tokens, pairs, _carried_bits)
    exponent, ask = np.uint32(23), _asking(run)

    def add_block(x: Any, of_runs: Any, codes: Any, scales: Any, total: Any, at: Any) -> None:
        row, top, size, is_first = at
        columns = run * len(of_runs) // parts
        for begin in range(0, columns, run):
            for part in range(parts):
                first = part * columns + begin
                if is_first:
                    begins_next = begin + _AHEAD >= columns
                    soon = row + first + _AHEAD + (size - columns if begins_next else 0)
                    ask(codes, scales, soon if part < _QUARTERS - 1 else row, first, top)
                if part < _QUARTERS - 1:
                    plain(x, of_runs, codes, scales, total, (row + first, 0, first, top))
                else:
                    carried(x, of_runs, codes, scales, total, (row + begin, columns, first, top))

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
                    for token in range(tokens):
                        out[several * tokens + token, top + i] = total[token, i] * power

    return compiled_loop(multiply_blocks, parallel)


def _asking(run: int) -> Any:
    """Compile the request for codes of a run from `soon` on, and for the scales that the next block
    has where this one has those of column `first`.
    """
    fetch = prefetching()

    def ask(codes: Any, scales: Any, soon: int, first: int, top: int) -> None:
        for line in range(0, run, 64 // _BYTES):
            fetch(codes, soon + line, 0)
        for row in range(BLOCK_ROWS, 2 * BLOCK_ROWS, 64 // 2):
            fetch(scales, first // NARROW_GROUP + 1, top + row)

    return compiled_loop(ask, parallel=False)


_Codes = Callable[[Any, Any], tuple[Any, int, int]]
"""Instructions for bytes that have codes in their nibbles, from `load(part)` of columns' bytes; how
far the codes have to be moved down, and their mask."""


def _run_added(bits: int, tokens: int, pairs: bool, codes_of: _Codes) -> Any:
    """Compile the products with a run of columns, added to `total` `[tokens, 64]`: of `x` `[in,
    tokens]`, or `[in / 2, tokens]` of pairs, from `column` on, whose codes lie from `row` of
    `codes` on, or in parts `apart` from there, and with the scales of rows from `top` on. It is
    written out in vectors: numba would keep sums in memory.
    """
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    kinds: Any = types
    together = ((0, 1),) if tokens <= _ALL_ROWS else ((0,), (1,))

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = _Vectors(context, builder, signature.args, arguments, pairs)
        place = unpack_tuple(builder, arguments[5], 4)
        for halves in together:
            sums = vectors.sums(place, (tokens, RUNS[bits]), halves, codes_of)
            vectors.add_groups(place, bits, halves, sums)
        return context.get_dummy_value()

    unpack_tuple: Any = cgutils.unpack_tuple  # without annotations
    return intrinsic(
        lambda context, x, of_runs, codes, scales, total, at: (
            kinds.void(x, of_runs, codes, scales, total, kinds.UniTuple(kinds.int64, 4)),
            code,
        )
    )


class _Vectors:
    """Instructions with vectors of 16 numbers, for the arguments of `_run_added`'s function."""

    def __init__(self, context: Any, builder: Any, kinds: Any, arguments: Any, pairs: bool) -> None:
        from llvmlite import binding, ir

        binding.initialize_native_asmparser()
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
        builder, (row, apart, column, _), (tokens, run) = self._builder, place, size
        first = builder.udiv(column, self._long(self._step))
        asked = self._place(0, first, self._long(0))
        begins = [
            builder.add(row, builder.mul(apart, self._long(part))) for part in range(_QUARTERS - 1)
        ]
        bytes_ = self._vector(self._number, _BYTES * self._step // 4)
        held = [self._pointer(bytes_, 2, first, self._long(0)) for first in begins]
        sums = [[self._all_of(self._lanes, 0.0)] * (2 * len(halves)) for _ in range(tokens)]
        for at in range(run // self._step):

            def load(part: int, at: int = at) -> Any:
                return builder.load(builder.gep(held[part], [self._number(at)]), align=1)

            words = self._words(halves, *codes_of(builder, load))
            weights = [self._factor(each) for each in words]
            for token in range(tokens):
                value = asked, tokens * at + token
                pairs = zip(sums[token], weights, strict=True)
                sums[token] = [self._added(*each, value) for each in pairs]
        return sums

    def _words(self, halves: tuple[int, ...], held: Any, shift: int, mask: int) -> list[Any]:
        """Codes of 16 rows each from the bytes of a column, or two columns' in halves of words."""
        builder, order = self._builder, range(_LANES)
        bytes_ = builder.bitcast(held, self._vector(self._byte, _BYTES * self._step))
        if self._step > 1:
            places = [_BYTES * c + _LANES * h + i for i in order for c in (0, 1) for h in (0, 1)]
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
        self, place: Any, bits: int, halves: tuple[int, ...], sums: list[list[Any]]
    ) -> None:
        """Add to the total what `sums` are under scale and zero of their rows."""
        builder, (_, _, column, top) = self._builder, place
        group = builder.add(builder.udiv(column, self._long(NARROW_GROUP)), self._long(1))
        run = builder.udiv(column, self._long(RUNS[bits]))
        of_run = [self._spread(self._place(1, run, self._long(t))) for t in range(len(sums))]
        offset = (1 << (bits - 1)) + (0 if self._step == 1 else _BIAS)
        for number, low in enumerate(32 * i + 16 * each for each in halves for i in range(2)):
            first = self._long(low)
            scale, zero = self._scale_and_zero(group, builder.add(top, first), offset)
            for token, own in enumerate(sums):
                out = self._pointer(self._lanes, 4, self._long(token), first)
                added = self._plus(builder.load(out, align=4), scale, own[number])
                builder.store(self._plus(added, zero, of_run[token]), out, align=4)

    def _scale_and_zero(self, group: Any, rows: Any, half: int) -> tuple[Any, Any]:
        """Of 16 rows, without their powers of two; the zero is that of code -`half`."""
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

    def _plus(self, total: Any, one: Any, other: Any) -> Any:
        flags = ("contract", "reassoc", "nsz")
        product = self._builder.fmul(one, other, flags=flags)
        return self._builder.fadd(total, product, flags=flags)


def _both_nibbles(builder: Any, load: Any) -> tuple[Any, int, int]:
    return load(0), 0, 15


def _upper_bits(builder: Any, load: Any) -> tuple[Any, int, int]:
    """Of each nibble, whose lowest bit is of another column."""
    return load(0), 1, 7


def _carried_bits(builder: Any, load: Any) -> tuple[Any, int, int]:
    """The lowest bits of the nibbles of three parts, the highest first."""
    held = [load(part) for part in range(_QUARTERS - 1)]
    all_of: Any = held[0].type
    lowest = all_of([0x11111111] * all_of.count)
    joined = builder.and_(held[0], lowest)
    for own in held[1:]:
        doubled = builder.shl(joined, all_of([1] * all_of.count))
        joined = builder.or_(doubled, builder.and_(own, lowest))
    return joined, 0, 15
