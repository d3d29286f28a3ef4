"""Reading weights that are stored quantized: as codes where they are kept, else decoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quant.checkpoint.coded_weights import CodedWeight, coded_weights, describe, parts_beside
from quant.checkpoint.codes import WORD_MASK, GroupCodes, unpack_words
from quant.checkpoint.formats.tensors import (
    AWQ_FORM,
    FP4,
    GPTQ_FORM,
    INT8_SCALES,
    INTEGERS,
    NARROW_PART,
    PACKED,
    SCALED,
    SCALES,
    SIGNED4,
    STATES,
    TABLE,
    WHOLE_SCALES,
    Blocks,
    stored_part,
)
from quant.checkpoint.read_ahead import FileRange
from quant.checkpoint.stored_config import WORD_BITS, StoredConfig, StoredLinear
from quant.checkpoint.stored_tensors import StoredTensor
from quant.checkpoint.tensor_files import SafetensorsFiles
from quant.common.errors import CheckpointError
from quant.devices import ranges, row_blocks
from quant.narrow import decode_scales

Rows = slice | list[int]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs of the codes of a word of AutoAWQ, from the lowest bits on."""

_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


class CodedFiles:
    """The tensors of a quantized folder: its weights stand in place of their codes and scales, of
    which no name in `hidden` is asked for.
    """

    def __init__(self, files: SafetensorsFiles, config: StoredConfig, folder: Path) -> None:
        self._files, self._config, self._folder = files, config, folder
        self._marks = coded_weights(files.file_of, config)
        self.hidden = parts_beside(self._marks)
        self.file_of = files.file_of | {w: files.file_of[mark] for w, mark in self._marks.items()}

    def check(self) -> None:
        self._files.check()

    def range_of(self, name: str) -> FileRange:
        """Where a tensor lies, or the codes of a weight."""
        return self._files.range_of(name if name in self._files.file_of else self._marks[name])

    def shape_of(self, name: str) -> tuple[int, ...]:
        coded = self.coded(name)
        return self._files.shape_of(name) if coded is None else coded.shape or ()

    def read(self, name: str) -> Tensor:
        coded = self.coded(name)
        if coded is None:
            return self._files.read(name)
        if coded.linear is not None:
            return self.read_codes(coded).dequantize()
        part = self._reader(coded)
        return _DECODERS[coded.form](part, coded)

    def coded(self, weight: str) -> CodedWeight | None:
        """How `weight` is stored; None: as it is, or it is no weight."""
        if weight not in self._marks:
            return None
        return describe(weight, self._config, self._folder, self._find)

    def read_codes(self, coded: CodedWeight, kept: Rows = slice(None)) -> GroupCodes:
        """Read the `kept` rows of a weight of integer codes, to the host. CheckpointError, naming
        the tensor, for numbers that cannot be.
        """
        assert coded.linear is not None, "asked of integer codes"
        part, place = self._reader(coded), f"tensor {coded.stem} in {self._folder}"
        stated = part("weight_shape") if coded.form == PACKED else None
        if stated is not None and tuple(stated.tolist()) != coded.shape:
            raise CheckpointError(
                f"{place}: its weight_shape says {stated.tolist()}, but its codes are those of "
                f"{list(coded.shape or ())}; the checkpoint is damaged"
            )
        codes = _READERS[coded.form](part, coded, self._config, kept)
        codes.check_finite(place)
        groups, index = codes.scale.shape[1], codes.group_of_column
        if int(index.min()) < 0 or int(index.max()) >= groups:
            raise CheckpointError(
                f"{place}: its g_idx does not give each of {len(index)} inputs one of {groups} "
                "groups; the checkpoint is damaged"
            )
        return codes

    def _find(self, name: str) -> StoredTensor | None:
        return self._files.stored(name) if name in self._files.file_of else None

    def _reader(self, coded: CodedWeight) -> _Part:
        def read(part: str) -> Tensor | None:
            name = stored_part(coded.stem, part, self._config.method)
            return self._files.read(name) if name in self._files.file_of else None

        return read


_Part = Callable[[str], Tensor | None]
"""Gives a part of a module by the last part of its name; None where there is none."""


def _needed(part: _Part, name: str) -> Tensor:
    found = part(name)
    assert found is not None, "described before"
    return found


def _linear(coded: CodedWeight) -> tuple[int, int, StoredLinear]:
    assert coded.shape is not None, "described before it is read"
    assert coded.linear is not None, "asked of integer codes"
    return *coded.shape, coded.linear


def _gptq(part: _Part, coded: CodedWeight, config: StoredConfig, kept: Rows) -> GroupCodes:
    rows, columns, linear = _linear(coded)
    words = _needed(part, "qweight")[:, kept].t()
    narrow = part(NARROW_PART)
    if narrow is not None:
        scale, low = (each.bfloat16() for each in decode_scales(narrow[kept], linear.bits))
        return GroupCodes(
            codes=_unpacked(words, linear.bits, columns),
            scale=scale,
            zero=torch.full(scale.shape, 1 << (linear.bits - 1), dtype=torch.uint8),
            group_of_column=_group_of_column(None, columns, linear),
            bits=linear.bits,
            low=low,
            narrow=True,
        )
    scales = _needed(part, "scales")
    zeros = _gptq_zeros(_needed(part, "qzeros"), linear.bits, rows, config.zero_offset)
    return GroupCodes(
        codes=_unpacked(words, linear.bits, columns),
        scale=scales.t()[kept].contiguous(),
        zero=zeros[kept],
        group_of_column=_group_of_column(part("g_idx"), columns, linear),
        bits=linear.bits,
    )


def _gptq_zeros(qzeros: Tensor, bits: int, rows: int, offset: int) -> Tensor:
    """Unpack zeros uint8 `[out, groups]`. The offset is added as GPTQModel adds it: at 4 and 8 bit
    to whole words, which undoes what its writer's subtraction borrowed, else to each zero.
    """
    largest = (1 << bits) - 1
    if WORD_BITS % bits == 0:
        every_field = (WORD_MASK // largest) * offset
        words = (qzeros.long() + every_field) & WORD_MASK
        wrapped = torch.where(words > WORD_MASK >> 1, words - WORD_MASK - 1, words)
        return unpack_words(wrapped.int(), bits, rows).t().contiguous()
    zeros = unpack_words(qzeros, bits, rows)
    return zeros.add_(offset).bitwise_and_(largest).t().contiguous()


def _awq(part: _Part, coded: CodedWeight, config: StoredConfig, kept: Rows) -> GroupCodes:
    _, columns, linear = _linear(coded)
    codes, zero = (_awq_codes(_needed(part, name)) for name in ("qweight", "qzeros"))
    scales = _needed(part, "scales")
    return GroupCodes(
        codes=codes[kept],
        scale=scales.t()[kept].contiguous(),
        zero=zero[kept].contiguous(),
        group_of_column=_group_of_column(None, columns, linear),
        bits=linear.bits,
    )


def _awq_codes(words: Tensor) -> Tensor:
    """Unpack int32 `[n, out / 8]` to uint8 `[out, n]`."""
    turned = words.t().contiguous()
    codes = torch.empty(len(turned), len(AWQ_ORDER), turned.shape[1], dtype=torch.uint8)
    for block in row_blocks(len(turned), turned.shape[1], turned.device):
        for place, output in enumerate(AWQ_ORDER):
            codes[block, output] = (turned[block] >> 4 * place).bitwise_and_(15)
    return codes.flatten(0, 1)


def _packed(part: _Part, coded: CodedWeight, config: StoredConfig, kept: Rows) -> GroupCodes:
    rows, columns, linear = _linear(coded)
    scale, zeros = _rows_of_scale(part, rows), part("weight_zero_point")
    zero = torch.full(scale.shape, 1 << (linear.bits - 1), dtype=torch.uint8)
    if zeros is not None:
        zero = unpack_words(zeros.t(), linear.bits, rows).t()
    return GroupCodes(
        codes=_unpacked(_needed(part, "weight_packed")[kept], linear.bits, columns),
        scale=scale[kept].contiguous(),
        zero=zero[kept].contiguous(),
        group_of_column=_group_of_column(part("weight_g_idx"), columns, linear),
        bits=linear.bits,
    )


def _integers(part: _Part, coded: CodedWeight, config: StoredConfig, kept: Rows) -> GroupCodes:
    """Codes with a sign, one a byte."""
    rows, columns, linear = _linear(coded)
    half, scale = 1 << (linear.bits - 1), _rows_of_scale(part, rows)
    zeros = part("weight_zero_point")
    zero = torch.zeros(scale.shape, dtype=torch.int8) if zeros is None else zeros
    return GroupCodes(
        codes=_above_zero(_needed(part, "weight")[kept], half),
        scale=scale[kept].contiguous(),
        zero=_above_zero(zero.reshape(-1, scale.shape[1]).expand(scale.shape)[kept], half),
        group_of_column=_group_of_column(None, columns, linear),
        bits=linear.bits,
    )


def _above_zero(codes: Tensor, half: int) -> Tensor:
    return (codes.to(torch.int16) + half).to(torch.uint8)


def _rows_of_scale(part: _Part, rows: int) -> Tensor:
    """Scales `[out, groups]`; one that all rows share is there for each."""
    largest = part(INT8_SCALES)
    if largest is not None:
        return (largest / 127).view(-1, 1)
    scale = _needed(part, "weight_scale")
    return scale.reshape(1, 1).expand(rows, 1) if scale.numel() == 1 else scale


def _unpacked(words: Tensor, bits: int, columns: int) -> Tensor:
    codes = torch.empty(len(words), columns, dtype=torch.uint8)
    for block in row_blocks(len(codes), columns, codes.device):
        codes[block] = unpack_words(words[block], bits, columns)
    return codes


def _group_of_column(index: Tensor | None, columns: int, linear: StoredLinear) -> Tensor:
    if index is None:
        return torch.arange(columns, dtype=torch.int32) // linear.group_size
    return index.int()


_READERS: Mapping[str, Callable[[_Part, CodedWeight, StoredConfig, Rows], GroupCodes]] = {
    GPTQ_FORM: _gptq,
    AWQ_FORM: _awq,
    PACKED: _packed,
    INTEGERS: _integers,
}


def decode_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Decode uint8 `packed` `[..., groups, bytes]`, two codes (E2M1) a byte, the first one low,
    with a `scale` `[..., groups]` each to float32 `[..., groups * 2 * bytes]`, exactly.
    """
    table = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return table[codes.int()].mul_(scale.unsqueeze(-1)).flatten(-2)


def scale_values(stored: Tensor) -> Tensor:
    """Scales in float32; bytes are exponents of two."""
    if stored.dtype == torch.uint8:
        return torch.exp2(stored.float() - _EXPONENT_BIAS)
    return stored.float()


def _fp4(part: _Part, coded: CodedWeight) -> Tensor:
    packed, scale = part("weight_packed"), scale_values(_needed(part, "weight_scale"))
    packed = _needed(part, "weight") if packed is None else packed
    divisor, factor = (part(name) for name in WHOLE_SCALES)
    scale = scale if divisor is None else scale / divisor
    scale = scale if factor is None else scale * factor
    return decode_fp4(packed.view(len(packed), scale.shape[1], -1), scale)


def _signed4(part: _Part, coded: CodedWeight) -> Tensor:
    """Multiply codes with a sign, two a byte, the first one low, and add zeros, in float32."""
    packed, scale, zero = (_needed(part, name) for name in _SIGNED4)
    codes = torch.stack((packed << 4, packed), dim=-1).view(len(packed), len(scale), -1) >> 4
    return codes.float().mul_(scale.t().unsqueeze(-1)).add_(zero.t().unsqueeze(-1)).flatten(1)


_SIGNED4 = ("weight", "weight_scale", "weight_zero_point")


def _scaled(part: _Part, coded: CodedWeight) -> Tensor:
    """Multiply floating-point codes `[out, in]` by their scales, in float32."""
    name = next(name for name in SCALES if part(name) is not None)
    weight, scale = _needed(part, "weight").float(), scale_values(_needed(part, name))
    if coded.scheme.block is None:
        return weight.mul_(scale if scale.numel() == 1 else scale.view(-1, 1))
    rows, columns = coded.scheme.block
    if rows == 1 and not weight.shape[1] % columns:
        weight.unflatten(1, (-1, columns)).mul_(scale.unsqueeze(-1))
        return weight
    for index, own in enumerate(scale):
        part_of_rows = weight[index * rows : (index + 1) * rows]
        part_of_rows.mul_(own.repeat_interleave(columns)[: weight.shape[1]])
    return weight


def _of_table(part: _Part, coded: CodedWeight) -> Tensor:
    """Numbers of a table by two codes a byte, the first one high, times the maxima of blocks."""
    state = next(found for name in STATES if (found := part(name)) is not None)
    blocks = Blocks.parse(bytes(state.tolist()))
    packed, largest = _needed(part, "weight").view(-1), _needed(part, "weight.absmax")
    if blocks.nested:
        each = _needed(part, "weight.nested_absmax").repeat_interleave(blocks.nested)
        table = _needed(part, "weight.nested_quant_map")
        largest = table[largest.int()] * each[: len(largest)] + blocks.offset
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).view(-1)
    values = _needed(part, "weight.quant_map")[codes.int()][: math.prod(blocks.shape)]
    for block in ranges(len(values), blocks.size << 10):
        some, first = values[block], block.start // blocks.size
        each = largest[first : first - (-len(some) // blocks.size)]
        some.mul_(each.repeat_interleave(blocks.size)[: len(some)])
    return values.view(blocks.shape)


_DECODERS: Mapping[str, Callable[[_Part, CodedWeight], Tensor]] = {
    FP4: _fp4,
    SCALED: _scaled,
    SIGNED4: _signed4,
    TABLE: _of_table,
}
