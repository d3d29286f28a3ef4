"""The layout of torch's int4 kernel for CPUs, and products with many tokens, for which rows are
decoded.

The kernel multiplies in float32: no loss for few tokens, where reading the weight takes the time,
but far slower than bfloat16 dot products for many, for which blocks of rows are decoded to bfloat16
and multiplied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from quant.backends.base import ThreadWords, form_of, read_scales
from quant.backends.cpu.int4_vectors import DECODED, columns_decoded
from quant.backends.cpu.upper_bits import (
    BLOCK_ROWS,
    HALF_ROWS,
    UPPER_BYTES,
    steps_of_pairs,
    steps_of_super_blocks,
)
from quant.devices import WIDE_ROWS, prefers_float32, ranges, row_blocks
from quant.narrow import MIDDLE_ZERO, zero_steps
from quant.numba_loops import as_array, compiled_loop, has_numba, torch_threads
from quant.scheme import NARROW_GROUP, ScaleForm

_BITS, _MIDDLE = 4, 8
"""Of the kernel, and the code whose value the kernel takes to be zero."""

_MANY_TOKENS, _MANY_COMPILED = 96, 32
"""Number of tokens from which decoding is worth its time, by torch and by a compiled loop: at 1536
x 2048 on one core of an AMD EPYC the kernel takes 0.07 ms a token; decoding takes 2.3 and 0.7 ms,
and then a product 0.035 ms a token."""

_LEAST_COMPILED = 3 * 2**15
"""Least weights for the compiled loop: small models need not wait for the compiler. Keys and values
of SmolLM2 135M and Qwen2.5 0.5B have more; without it, 5 bit takes six times as long."""

_TURNED = 8
"""Rows and columns of codes, a byte each, that change places together in words of 64 bits."""

_LEAST_TURNED = 1 << 22
"""Weights for which that is worth compiling, as there are many alike: a seventh of the time of the
kernel's own packing, which goes over codes of 32 bits."""

_SEGMENT_COLUMNS = 8192
"""Columns decoded at once: a block of 64 rows is then 2 MB of float32. A quarter of that would fit
into a core's L2 cache, but products take 5 % longer for the calls."""

_DECODED_TO = (torch.bfloat16, torch.float32)

_SCALE_WORDS = 1 << 20
"""Scales restored at once for few tokens, 4 MB: of an eighth, the calls take a tenth longer."""

_PRODUCT_WEIGHTS = 1 << 21
_PRODUCT_ROWS = 256
"""Weights and rows decoded for one product: at least so many rows (below, products run slower), and
for short rows as many as hold so many weights, 4 MB."""


def pack_weight(codes: torch.Tensor) -> torch.Tensor:
    """Pack all codes `[rows, in]` of a weight to uint8 `[rows, in / 2]`."""
    rows, columns = codes.shape
    blob = torch.empty(rows, columns // 2, dtype=torch.uint8)
    block, done = _interleaved_rows(), 0
    if block and codes.numel() >= _LEAST_TURNED and has_numba() and not columns % _TURNED:
        done = rows // block * block
        whole, packed = (each[:done].numpy().view(np.uint64) for each in (codes.contiguous(), blob))
        packed = packed.reshape(-1, columns, block // 2 // _TURNED)
        _in_parts(_packing(block // 2), len(packed), whole, packed)
    for part in row_blocks(rows - done, columns, codes.device, multiple=BLOCK_ROWS):
        own = slice(done + part.start, done + part.stop)
        blob[own] = pack_codes(codes[own])
    return blob


def _in_parts(loop: Callable[..., None], count: int, *arrays: Any) -> None:
    """Call `loop(first, end, *arrays)` for parts of `count` on as many threads as torch has."""
    threads = torch.get_num_threads()
    parts = list(ranges(count, max(1, -(-count // threads))))
    with ThreadPoolExecutor(max(1, len(parts))) as pool:
        list(pool.map(lambda part: loop(part.start, part.stop, *arrays), parts))


@functools.cache
def _turning() -> Any:
    """Compile `turn(eights)` of uint64 `[8]`: byte i of word j becomes byte j of word i."""
    masks = np.array([0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF, 0x00000000FFFFFFFF], np.uint64)

    def turn(eights: Any) -> None:
        for step in range(3):
            apart, mask = 1 << step, masks[step]
            shift = np.uint64(8 * apart)
            for i in range(_TURNED):
                if not i & apart:
                    low, high = eights[i], eights[i + apart]
                    other = ((low >> shift) ^ high) & mask
                    eights[i], eights[i + apart] = low ^ (other << shift), high ^ other

    return compiled_loop(turn, parallel=False, exact=True)


@functools.cache
def _packing(half: int) -> Any:
    """Compile the packing of blocks of codes uint64 `[rows, in / 8]` to uint64 `[blocks, in, half /
    8]`: a byte has the codes of rows r and r + half of a block.
    """
    turn, four = _turning(), np.uint64(4)

    def pack(first: int, end: int, codes: Any, blob: Any) -> None:
        eights = np.empty(_TURNED, np.uint64)
        for block in range(first, end):
            for place in range(codes.shape[1]):
                for part in range(half // _TURNED):
                    top = 2 * half * block + _TURNED * part
                    for i in range(_TURNED):
                        other = codes[top + half + i, place] << four
                        eights[i] = codes[top + i, place] | other
                    turn(eights)
                    for i in range(_TURNED):
                        blob[block, _TURNED * place + i, part] = eights[i]

    return compiled_loop(pack, parallel=False, exact=True)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    blob: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        codes.to(torch.int32), 1
    )
    return blob


def pack_scales(held: torch.Tensor) -> torch.Tensor:
    """Turn scales and zeros as `held_scales` has them to `[groups, rows, 2]`: those of bytes, what
    rows and blocks have in front, or bfloat16, by which GPTQ's float16 loses three bits of eleven.
    """
    turned = held.transpose(0, 1)
    is_pairs = form_of(held) is ScaleForm.PAIRS
    return (turned.to(torch.bfloat16) if is_pairs else turned).contiguous()


def kernel_scales(
    packed: torch.Tensor, block: slice, code_step: int = 1, bits: int = _BITS
) -> torch.Tensor:
    """Restore for a block of rows what the kernel takes, bfloat16 `[groups, rows, 2]`, until the
    next call of this thread. Narrow scales are of codes that have been multiplied by `code_step`;
    those of super-blocks stay as they are.
    """
    if form_of(packed) is not ScaleForm.NARROW:
        return packed[:, block].contiguous()
    groups, rows = len(packed) - 1, packed.shape[1]
    count = len(range(*block.indices(rows)))
    if not is_compiled(groups * NARROW_GROUP * rows):
        scale, zero = read_scales(packed[:, block].transpose(0, 1), bits)
        return pack_scales(torch.stack((scale / code_step, zero), dim=-1))
    words = _MEMORY.words(groups * count).view(groups, count)
    loop = _restoring(torch.get_num_threads() > 1)
    pairs = packed.view(torch.int16).squeeze(-1).numpy().view(np.uint16)
    with torch_threads() if torch.get_num_threads() > 1 else nullcontext():
        first, parts = block.indices(rows)[0], zero_steps(bits)
        loop(pairs, first, code_step, parts, words.numpy().view(np.uint32))
    return words.view(torch.bfloat16).view(groups, count, 2)


_MEMORY = ThreadWords()


@functools.cache
def _restoring(parallel: bool) -> Any:
    import numba

    low, eight, half, exponent = map(np.uint32, (255, 8, 16, 23))
    cut = np.uint32(0xFFFF0000)

    def restore(pairs: Any, first: int, code_step: int, parts: int, words: Any) -> None:
        rows, step = words.shape[1], np.float32(code_step)
        least = step / np.float32(parts)
        middle = least * np.float32(MIDDLE_ZERO)
        powers = np.empty(rows, np.float32)
        for row in range(rows):
            powers[row] = np.uint32(np.uint32(pairs[0, first + row]) << exponent).view(np.float32)
            powers[row] /= step
        for group in numba.prange(len(words)):
            own, out = pairs[group + 1, first : first + rows], words[group]
            for row in range(rows):
                both = np.uint32(own[row])
                scale = np.float32(np.int32(both & low)) * powers[row]
                zero = (np.float32(np.int32(both >> eight)) * least - middle) * scale
                zeros = np.float32(zero).view(np.uint32) & cut
                out[row] = zeros | (np.float32(scale).view(np.uint32) >> half)

    return compiled_loop(restore, parallel, exact=True)


def few_rows(columns: int, rows: int) -> int:
    """Rows of a weight whose scales are restored at once."""
    if not _interleaved_rows():
        return rows
    return min(rows, whole_blocks(_SCALE_WORDS * NARROW_GROUP // columns))


def multiply_few(
    x: torch.Tensor, blob: torch.Tensor, scale_zero: torch.Tensor, group: int
) -> torch.Tensor:
    """Call the kernel: bfloat16 `x` `[tokens, in]`, `blob` `[rows, in / 2]`, to `[tokens, rows]`; a
    weight is `(code - 8) * scale + zero`.
    """
    out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, blob, group, scale_zero)
    return out


def is_many(x: torch.Tensor, rows: int) -> bool:
    most_few = _MANY_COMPILED if is_compiled(rows * x.shape[1]) else _MANY_TOKENS
    return x.shape[0] >= most_few and layout_is_known()


def is_compiled(weights: int) -> bool:
    return weights >= _LEAST_COMPILED and has_numba()


def multiply_many(
    x: torch.Tensor,
    rows: int,
    parts_of: Callable[[slice], tuple[torch.Tensor, torch.Tensor]],
    group: int,
    bits: int = _BITS,
) -> torch.Tensor:
    """Multiply as `multiply_few` with codes and scales of blocks, in float32 where that is sooner
    done; rows beyond the last whole block, of another layout, go to the kernel. More than 4 bits
    are for the compiled loop alone.
    """
    columns = x.shape[1]
    step = min(product_rows(columns), whole_blocks(rows))
    factors = x.to(_DECODED_TO[prefers_float32(x.dtype, x.device, len(x))])
    memory = factors.new_empty(step * columns)
    out = x.new_empty(x.shape[0], rows)
    decoder = None if is_compiled(rows * columns) else _Decoder(columns, group)
    for block in stretches(rows, step):
        (blob, own), size = parts_of(block), block.stop - block.start
        weight = memory[: size * columns]
        if size % BLOCK_ROWS:
            out[:, block] = multiply_few(x, blob, own, group)
        elif decoder is None:
            out[:, block] = torch.mm(
                factors, _turned(weight.view(columns, size), blob, own, group, bits)
            )
        else:
            weight = weight.view(size, columns)
            decoder.fill(weight, blob, own)
            out[:, block] = functional.linear(factors, weight)
    return out


def _turned(
    weight: torch.Tensor, blob: torch.Tensor, scale_zero: torch.Tensor, group: int, bits: int
) -> torch.Tensor:
    """Decode to `weight` `[in, rows]`, float32 or bfloat16, the same bits as `_Decoder`'s."""
    form = form_of(scale_zero)
    kinds = (torch.int32, np.uint32) if form is ScaleForm.PAIRS else (torch.int16, np.uint16)
    words = scale_zero.view(kinds[0]).squeeze(-1).numpy().view(kinds[1])
    codes = blob.view(-1, HALF_ROWS).numpy()
    with torch_threads():
        loop = _decoding(torch.get_num_threads() > 1, bits, form)
        loop(codes, words, group, as_array(weight))
    return weight


@functools.cache
def _decoding(parallel: bool, bits: int, form: ScaleForm) -> Any:
    """Compile the loop, whose vectors are the rows of a block, as they lie in a column: three to
    eight times as fast as torch's passes, of which one turns the codes.
    """
    import numba

    behind, fill = UPPER_BYTES[bits], columns_decoded(bits)
    prepare = steps_of_pairs(bits) if form is ScaleForm.PAIRS else steps_of_super_blocks(bits)

    def decode(codes: Any, words: Any, group: int, weight: Any) -> None:
        columns, blocks = weight.shape[0], weight.shape[1] // BLOCK_ROWS
        for block in numba.prange(blocks):
            top, row = BLOCK_ROWS * block, len(codes) // blocks * block
            steps, zeros = np.empty(BLOCK_ROWS, np.float32), np.empty(BLOCK_ROWS, np.float32)
            for place in range((columns + group - 1) // group):
                prepare(words, (place, top, columns), steps, zeros)
                for column in range(place * group, min((place + 1) * group, columns), DECODED):
                    more = row + columns + column * behind // HALF_ROWS
                    fill(steps, zeros, codes, weight, (row + column, more, column, top))

    return compiled_loop(decode, parallel, exact=True)


def warm_up(columns: int, scales: torch.Tensor, group: int, bits: int) -> None:
    """Compile the loops for many tokens and a weight that has `scales` of so many bits."""
    if not is_compiled(scales.shape[1] * columns):
        return
    blob = torch.zeros(BLOCK_ROWS, columns * bits // 8, dtype=torch.uint8)
    own, cpu = kernel_scales(scales, slice(0, BLOCK_ROWS), bits=bits), torch.device("cpu")
    for is_wide in {prefers_float32(torch.bfloat16, cpu, each) for each in (1, WIDE_ROWS)}:
        memory = torch.empty(columns, BLOCK_ROWS, dtype=_DECODED_TO[is_wide])
        _turned(memory, blob, own, group, bits)


def stretches(rows: int, step: int) -> Iterator[slice]:
    whole = rows - rows % BLOCK_ROWS
    yield from ranges(whole, step)
    if whole < rows:
        yield slice(whole, rows)


def whole_blocks(rows: int) -> int:
    return max(rows // BLOCK_ROWS, 1) * BLOCK_ROWS


def product_rows(columns: int) -> int:
    return whole_blocks(max(_PRODUCT_WEIGHTS // columns, _PRODUCT_ROWS))


class _Decoder:
    """Decodes rows of `columns` weights into the same scratch memory: mapping pages would take
    longer.
    """

    def __init__(self, columns: int, group: int) -> None:
        self.columns, self.group = columns, group
        self.segment = min(columns, _SEGMENT_COLUMNS)
        self.blocks = max(1, _SEGMENT_COLUMNS // columns)
        weights = self.blocks * BLOCK_ROWS * self.segment
        self.turned = torch.empty(weights // 2, dtype=torch.uint8)
        self.codes = torch.empty(weights, dtype=torch.uint8)
        self.values = torch.empty(weights, dtype=torch.float32)

    def fill(self, weight: torch.Tensor, blob: torch.Tensor, scale_zero: torch.Tensor) -> None:
        scale = scale_zero[:, :, 0].t().float().contiguous().unsqueeze(-1)
        zero = scale_zero[:, :, 1].t().float().unsqueeze(-1).sub(scale, alpha=_MIDDLE)
        pairs = blob.view(-1, self.columns, HALF_ROWS)  # a byte: rows r and r + 32 of a block
        for block in ranges(len(weight), self.blocks * BLOCK_ROWS):
            own = pairs[block.start // BLOCK_ROWS : block.stop // BLOCK_ROWS]
            for segment in ranges(self.columns, self.segment):
                groups = slice(segment.start // self.group, segment.stop // self.group)
                values = self._codes(own[:, segment]).view(block.stop - block.start, -1, self.group)
                values.mul_(scale[block, groups]).add_(zero[block, groups])
                weight[block, segment] = values.flatten(1)

    def _codes(self, pairs: torch.Tensor) -> torch.Tensor:
        """Unpack codes as float32 `[blocks, 2, 32, columns]` from bytes `[blocks, columns, 32]`."""
        blocks, columns, _ = pairs.shape
        half = pairs.numel()
        # Three dimensions even for one block: torch's path for matrices takes twice as long.
        turned = self.turned[:half].view(blocks, HALF_ROWS, columns)
        turned.copy_(pairs.transpose(1, 2))
        codes = self.codes[: 2 * half].view(blocks, 2, HALF_ROWS, columns)
        torch.bitwise_and(turned, 15, out=codes[:, 0])
        torch.bitwise_right_shift(turned, 4, out=codes[:, 1])
        return self.values[: 2 * half].view(codes.shape).copy_(codes)


def layout_is_known() -> bool:
    return _interleaved_rows() == BLOCK_ROWS


def has_avx2_layout() -> bool:
    return _interleaved_rows() == HALF_ROWS


@functools.cache
def _interleaved_rows() -> int:
    """The rows whose codes the kernel of this CPU interleaves: 64 with AVX-512, 32 with AVX2 and 0
    where it does otherwise.
    """
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (2 * BLOCK_ROWS, 64), generator=generator, dtype=torch.uint8)
    packed = pack_codes(codes).flatten()
    for rows in (BLOCK_ROWS, HALF_ROWS):
        low, high = codes.view(-1, 2, rows // 2, 64).unbind(1)
        if torch.equal(packed, (low | high << 4).transpose(1, 2).flatten()):
            return rows
    return 0
