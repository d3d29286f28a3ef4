"""3 to 6 bit on CPUs in the blocks of torch's int4 kernel, for bfloat16 activations."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch.nn import functional

from quant.backends.base import (
    CanonicalPacked,
    ThreadWords,
    decode_held,
    form_of,
    held_scales,
    read_scales,
)
from quant.backends.cpu import int4_few
from quant.backends.cpu.int4_layout import (
    few_rows,
    has_avx2_layout,
    is_compiled,
    is_many,
    kernel_scales,
    layout_is_known,
    multiply_few,
    multiply_many,
    pack_codes,
    pack_scales,
    pack_weight,
    product_rows,
    stretches,
    warm_up,
    whole_blocks,
)
from quant.backends.cpu.upper_bits import (
    BLOCK_ROWS,
    HALF_ROWS,
    pack_blocks,
    unpack_blocks,
    unpack_rows,
)
from quant.common.errors import SpecError
from quant.devices import ranges, row_blocks
from quant.rounding.canonical import CanonicalWeight, decode
from quant.scheme import NARROW_GROUP, ScaleForm


def _restored(
    blob: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """Restore whole blocks of the kernel's layout `[rows, in / 2]` on any device."""
    pairs = blob.view(-1, x.shape[-1], HALF_ROWS).transpose(1, 2)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=1).view(len(blob), -1)
    return decode(codes, *scales, 4).to(x.dtype)


def _scales_on(
    packed: torch.Tensor, device: torch.device, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros `[rows, groups]` on the device."""
    return read_scales(packed.to(device, non_blocking=True).transpose(0, 1), bits)


@dataclass(frozen=True)
class _Blocks(CanonicalPacked):
    """Scales of super-blocks stand beside blocks of our own, which torch's kernel does not know:
    `packed` as `pack_blocks`; so do narrow ones where that kernel has AVX2 alone.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    group: int

    @classmethod
    def _in_blocks(cls, canonical: CanonicalWeight) -> Self:
        rows, columns = canonical.codes.shape
        if rows % BLOCK_ROWS or columns % NARROW_GROUP:
            raise SpecError(
                f"int{cls.bits}pack takes multiples of {BLOCK_ROWS} output and {NARROW_GROUP} "
                f"input features, not {rows} and {columns}; use backend torch_{cls.bits}bit"
            )
        is_layout = cls.bits == Int4Pack.bits and layout_is_known()
        codes = canonical.codes
        packed = pack_weight(codes) if is_layout else pack_blocks(codes, cls.bits)
        return cls(packed, pack_scales(held_scales(canonical)), canonical.group)

    @property
    def _has_super_blocks(self) -> bool:
        return form_of(self.scales) is ScaleForm.SUPER_BLOCKS

    @classmethod
    def _is_left_to_loops(cls, form: ScaleForm, rows: int, columns: int) -> bool:
        """Whether blocks of 3 or 4 bit are those that our loops read, though torch's kernel has
        others: with AVX2, loops take 0.7 to 0.8 of its time at 4 bit, and 0.3 to 0.65 at 3 bit (1
        to 16 tokens of 4096 x 4096 on a core of an Intel Xeon that is held to AVX2).
        """
        may_be = cls.bits <= Int4Pack.bits and form is ScaleForm.NARROW and has_avx2_layout()
        whole = rows % BLOCK_ROWS == 0 and int4_few.fits(cls.bits, columns)
        return may_be and whole and is_compiled(rows * columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1]).contiguous()
        if self._is_compiled(tokens):
            out = int4_few.multiply(self.bits, tokens, self.packed, self.scales)
        elif self._has_super_blocks:
            out = self._multiply_blocks(tokens)
        elif is_many(tokens, len(self.packed)) or self._has_other_blocks(tokens.shape[1]):
            out = self._multiply_many(tokens)
        else:
            out = self._multiply_few(tokens)
        return out.view(*x.shape[:-1], len(self.packed))

    def _is_compiled(self, x: torch.Tensor) -> bool:
        is_taken = form_of(self.scales) is not ScaleForm.PAIRS and self._is_known
        worth_it = is_taken and is_compiled(x.shape[1] * len(self.packed))
        return worth_it and int4_few.takes(self.bits, x.shape[1], len(x))

    def _has_other_blocks(self, columns: int) -> bool:
        return self._is_left_to_loops(form_of(self.scales), len(self.packed), columns)

    @property
    def _is_known(self) -> bool:
        """Whether our own loops can read all of the layout."""
        is_known = self._has_super_blocks or layout_is_known()
        columns = self.packed.shape[1] * 8 // self.bits
        whole = len(self.packed) % BLOCK_ROWS == 0
        return whole and (is_known or self._has_other_blocks(columns))

    @abstractmethod
    def _multiply_few(self, x: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _multiply_many(self, x: torch.Tensor) -> torch.Tensor: ...

    def _multiply_blocks(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = len(self.packed), x.shape[1]
        if is_compiled(rows * columns):
            return multiply_many(x, rows, self._parts_of_block, self.group, self.bits)
        out = x.new_empty(len(x), rows)
        for block in row_blocks(rows, columns, x.device, multiple=BLOCK_ROWS):
            part = type(self)(self.packed[block], self.scales[:, block], self.group)
            out[:, block] = functional.linear(x, part._restored_blocks(x))
        return out

    def _parts_of_block(self, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self.packed[block], kernel_scales(self.scales, block, bits=self.bits)

    def _restored_blocks(self, x: torch.Tensor) -> torch.Tensor:
        packed, scales = (
            each.to(x.device, non_blocking=True) for each in (self.packed, self.scales)
        )
        codes = unpack_blocks(packed, x.shape[-1], self.bits)
        return decode_held(codes, scales.transpose(0, 1), self.bits).to(x.dtype)

    def warm_up(self, in_features: int, dtype: torch.dtype) -> None:
        if self._is_known:
            warm_up(in_features, self.scales, self.group, max(self.bits, Int4Pack.bits))
        if self._is_compiled(torch.empty(1, in_features, dtype=dtype)):
            int4_few.warm_up(self.bits, in_features, self.packed, self.scales)


class Int4Pack(_Blocks):
    """4.5 bits a weight, or 4.625 with super-blocks. `packed`: uint8 `[out, in / 2]`; `scales` as
    `pack_scales`; the kernel's convention, `(code - 8) * scale + zero`, is the canonical one.
    """

    bits: ClassVar[int] = 4

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        form = canonical.form
        if form is ScaleForm.SUPER_BLOCKS or cls._is_left_to_loops(form, *canonical.codes.shape):
            return cls._in_blocks(canonical)
        scales = pack_scales(held_scales(canonical))
        return cls(pack_weight(canonical.codes), scales, canonical.group)

    def _multiply_few(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(self.packed)
        step = few_rows(x.shape[1], rows) if self.scales.dtype == torch.uint8 else rows
        if step == rows:
            return multiply_few(x, *self._parts(slice(None)), self.group)
        out = x.new_empty(len(x), rows)
        for block in ranges(rows, step):
            out[:, block] = multiply_few(x, *self._parts(block), self.group)
        return out

    def _multiply_many(self, x: torch.Tensor) -> torch.Tensor:
        return multiply_many(x, len(self.packed), self._parts, self.group)

    def _parts(self, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self.packed[block], kernel_scales(self.scales, block)

    def restored_for(self, x: torch.Tensor) -> torch.Tensor | None:
        if self._has_super_blocks:
            return self._restored_blocks(x)
        if not self._is_known:
            return None
        packed = self.packed.to(x.device, non_blocking=True)
        return _restored(packed, _scales_on(self.scales, x.device, self.bits), x)


_DOUBLED = 2

_FREE_BITS = 0x11111111
"""Mask of the lowest bit of each nibble of a 32-bit word, which doubled codes leave free."""

_SCRATCH_BYTES = 1 << 20
"""Bytes restored at once, unless 64 rows are more. On a core with 1 MB of L2 cache, half as much
takes a quarter longer (for the calls), and twice as much gains nothing."""


class Int3Pack(_Blocks):
    """3.5 bits a weight in main memory, restored to 4 as they are read.

    A 3-bit code takes three of a nibble's four bits in the int4 kernel's layout, so that three
    quarters of a block of 64 rows carry the last quarter in the bits that they leave free. A few
    blocks at a time are restored in scratch memory that stays in the core's cache.

    Codes are held doubled, which leaves the lowest bit free and turns the kernel's convention into
    the canonical one: `(2 * code - 8) * (scale / 2) + zero = (code - 4) * scale + zero`, exactly.

    `packed`: uint8 `[out, 3 * in / 8]`, every 64 rows one piece of memory; `scales` as
    `pack_scales`: narrow ones of codes as they are, others of doubled ones.
    """

    bits: ClassVar[int] = 3

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        codes = canonical.codes
        rows, columns = codes.shape
        packed = torch.empty(rows, 3 * columns // 8, dtype=torch.uint8)
        step = next(row_blocks(rows, columns, codes.device, multiple=BLOCK_ROWS)).stop
        is_ours = cls._is_left_to_loops(canonical.form, rows, columns)
        for block in stretches(rows, whole_blocks(step)):
            doubled = codes[block] << 1
            blob = pack_blocks(doubled, Int4Pack.bits) if is_ours else pack_codes(doubled)
            _fold(_parts(blob, 4), _parts(packed[block], 3))
        if not canonical.narrow:
            canonical = replace(canonical, scale=canonical.scale / 2)
        return cls(packed, pack_scales(held_scales(canonical)), canonical.group)

    def restored_for(self, x: torch.Tensor) -> torch.Tensor | None:
        if not self._is_known:
            return None
        packed, columns = self.packed.to(x.device, non_blocking=True), x.shape[-1]
        words = _Scratch.words(len(packed), columns)
        memory = torch.empty(words, dtype=torch.int32, device=x.device)
        scale, zero = _scales_on(self.scales, x.device, self.bits)
        if self.scales.dtype == torch.uint8:
            scale = scale / _DOUBLED
        return _restored(_Scratch(columns, memory).restore(packed), (scale, zero), x)

    def _multiply_few(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = len(self.packed), x.shape[1]
        step = min(whole_blocks(2 * _SCRATCH_BYTES // columns), whole_blocks(rows))
        scratch = _Scratch(columns, _MEMORY.words(_Scratch.words(step, columns)))
        out = x.new_empty(x.shape[0], rows)
        for block in stretches(rows, step):
            out[:, block] = multiply_few(x, *self._parts(scratch, block), self.group)
        return out

    def _multiply_many(self, x: torch.Tensor) -> torch.Tensor:
        columns = x.shape[1]
        words = _Scratch.words(product_rows(columns), columns)
        scratch = _Scratch(columns, torch.empty(words, dtype=torch.int32))
        parts_of = partial(self._parts, scratch)
        return multiply_many(x, len(self.packed), parts_of, self.group)

    def _parts(self, scratch: _Scratch, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
        scales = kernel_scales(self.scales, block, _DOUBLED)
        return scratch.restore(self.packed[block]), scales


_MEMORY = ThreadWords()
"""At most 1.75 times the greater of 1 MiB and 64 rows of codes."""


class _Scratch:
    def __init__(self, columns: int, memory: torch.Tensor) -> None:
        self.columns, self.memory = columns, memory
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    @staticmethod
    def words(rows: int, columns: int) -> int:
        return 7 * rows * columns // 32

    def restore(self, packed: torch.Tensor) -> torch.Tensor:
        """Restore the kernel's layout `[rows, in / 2]` of whole blocks or less, until the next
        call.
        """
        rows = len(packed)
        if rows not in self._views:  # they cost as much as the operations
            self._views[rows] = self._divide(rows)
        blob, quarters, carried = self._views[rows]
        _unfold(_parts(packed, 3), quarters, carried)
        return blob

    def _divide(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """View the memory as the layout, uint8 `[rows, in / 2]`, as its quarters, int32 `[blocks,
        4, words]`, and behind it what they carry, int32 `[blocks, 3, words]`.
        """
        count = rows * self.columns // 8
        blob = self.memory[:count].view(torch.uint8).view(rows, -1)
        quarters = _parts(blob, 4)
        carried = self.memory[count:][: 3 * count // 4].view(len(quarters), 3, -1)
        return blob, quarters, carried


def _parts(rows: torch.Tensor, count: int) -> torch.Tensor:
    return rows.view(torch.int32).view(max(1, len(rows) // BLOCK_ROWS), count, -1)


def _fold(quarters: torch.Tensor, packed: torch.Tensor) -> None:
    """Fill `packed` `[blocks, 3, words]` from `quarters` `[blocks, 4, words]`: part 0 carries the
    highest of the last quarter's three bits, part 2 the lowest.
    """
    shifts = torch.tensor([3, 2, 1], dtype=torch.int32).view(3, 1)
    carried = quarters[:, 3:].bitwise_right_shift(shifts).bitwise_and_(_FREE_BITS)
    torch.bitwise_or(quarters[:, :3], carried, out=packed)


def _unfold(packed: torch.Tensor, quarters: torch.Tensor, carried: torch.Tensor) -> None:
    """Undo `_fold` in five passes over 32-bit words (faster here than 64-bit ones)."""
    torch.bitwise_and(packed, ~_FREE_BITS, out=quarters[:, :3])
    torch.bitwise_and(packed, _FREE_BITS, out=carried)
    high, middle, low = carried.unbind(1)
    last = quarters[:, 3]
    torch.add(low, middle, alpha=2, out=last)
    last.add_(high, alpha=4)
    last.add_(last)


class _UpperBits(_Blocks):
    """5.5 and 6.5 bits a weight, with super-blocks 5.625 and 6.5625. `packed` as `pack_blocks`,
    uint8 `[out, in * bits / 8]`; `scales` as `pack_scales`.
    """

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        return cls._in_blocks(canonical)

    @property
    def _is_known(self) -> bool:
        return True

    def _multiply_few(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply_blocks(x)

    def _multiply_many(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply_blocks(x)

    def restored_for(self, x: torch.Tensor) -> torch.Tensor:
        return self._restored_blocks(x)

    def rows(self, which: torch.Tensor) -> torch.Tensor:
        columns = self.packed.shape[1] * 8 // self.bits
        codes = unpack_rows(self.packed, which, columns, self.bits)
        return decode_held(codes, self.scales[:, which].transpose(0, 1).contiguous(), self.bits)


class Int5Pack(_UpperBits):
    bits: ClassVar[int] = 5


class Int6Pack(_UpperBits):
    bits: ClassVar[int] = 6
