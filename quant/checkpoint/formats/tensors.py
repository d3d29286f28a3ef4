"""The tensors of a module by the form in which its weight is stored, and whether they fit together;
no torch.

| form | tensors | stored as |
|---|---|---|
| GPTQ | `qweight` `[in * bits / 32, out]`, `qzeros` `[groups, out * bits / 32]`, `scales`, `g_idx` | codes |
| GPTQ, narrow | `qweight`, `narrow` uint8 `[out, 1 + groups, 2]` | codes |
| AWQ | `qweight` `[in, out / 8]`, `qzeros` `[groups, out / 8]`, `scales` `[groups, out]` | codes |
| PACKED | `weight_packed` `[out, in * bits / 32]`, `weight_scale` `[out, groups]`, `weight_zero_point` | codes |
| FP4 | `weight_packed` or `weight` uint8 `[out, in / 2]`, `weight_scale`, of NVFP4 one scale for all | numbers |
| INTEGERS | `weight` int8 `[out, in]`, `weight_scale` and `weight_zero_point`, or `SCB` | codes |
| SCALED | `weight` FP8 `[out, in]`, `weight_scale` or `weight_scale_inv` | numbers |
| SIGNED4 | `weight` int8 `[out, in / 2]`, `weight_scale` and `weight_zero_point` `[groups, out]` | numbers |
| TABLE | `weight` uint8, two of a table `weight.quant_map` a byte, `weight.absmax` a block of them | numbers |

torchao has `_weight_qdata` for `weight`, `_weight_scale` and `_weight_zero_point`.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from quant.checkpoint.stored_config import (
    MODELOPT,
    OWN_BITS,
    TORCHAO,
    WHOLE_ROW,
    WORD_BITS,
    Scheme,
    StoredConfig,
    StoredLinear,
    bits_of_words,
)
from quant.checkpoint.stored_tensors import StoredTensor, stored_bytes
from quant.common.errors import CheckpointError
from quant.common.json_text import loads
from quant.scheme import FULL_BITS, NARROW_GROUP, ScaleForm

GPTQ_FORM, AWQ_FORM, PACKED, FP4 = "gptq", "awq", "packed", "fp4"
INTEGERS, SCALED, SIGNED4, TABLE = "integers", "scaled", "signed4", "table"

SCALES = ("weight_scale_inv", "weight_scale")
"""FP8's name of what weights are multiplied by, and that of others."""

WHOLE_SCALES = ("weight_global_scale", "weight_scale_2")
"""The scale of scales of NVFP4: compressed-tensors divides by it, ModelOpt multiplies with it."""

INT8_SCALES = "SCB"
"""The largest weights of rows of LLM.int8(), which codes of 127 stand for."""

STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
"""JSON, as bytes, that says how a weight was cut into blocks."""

NARROW_PART = "narrow"
"""Scales and zeros as `quant.narrow` holds them."""

TORCHAO_PARTS = {
    "weight": "_weight_qdata",
    "weight_scale": "_weight_scale",
    "weight_zero_point": "_weight_zero_point",
}
FLOATS = ("F64", "F32", "F16", "BF16")
_AWQ_CODES = 8
"""Codes of a word."""


def stored_part(stem: str, part: str, method: str) -> str:
    """The name of a tensor of the module `stem`."""
    return f"{stem}.{TORCHAO_PARTS.get(part, part) if method == TORCHAO else part}"


def codes_part(parts: Container[str]) -> str:
    """The part with the codes of a weight in FP4."""
    return "weight_packed" if "weight_packed" in parts else "weight"


@dataclass(frozen=True)
class Parts:
    """The tensors of a module by the last part of their names."""

    folder: Path
    stem: str
    tensors: Mapping[str, StoredTensor]
    config: StoredConfig
    scheme: Scheme

    def has(self, part: str) -> bool:
        return part in self.tensors

    def name(self, part: str) -> str:
        return stored_part(self.stem, part, self.config.method)

    def shape(self, part: str, sizes: int, *types: str) -> tuple[int, ...]:
        """The shape of a tensor with so many sizes, none of which is 0."""
        if part not in self.tensors:
            raise CheckpointError(
                f"{self.folder} has no tensor {self.name(part)}, without which the codes of "
                "this module say nothing; it is incomplete: download it again"
            )
        tensor = self.tensors[part]
        if tensor.dtype not in types:
            self.refuse(part, f"{' or '.join(types)} are read")
        shape = tensor.shape or ()
        if len(shape) != sizes or not all(shape):
            self.refuse(part, f"{sizes} sizes above 0 are needed")
        return shape

    def check(self, part: str, wanted: tuple[int, ...], *types: str) -> None:
        if self.shape(part, len(wanted), *types) != wanted:
            self.refuse(part, f"the other tensors of this module ask for {list(wanted)}")

    def refuse(self, part: str, why: str) -> NoReturn:
        tensor = self.tensors[part]
        raise CheckpointError(
            f"{self.folder / tensor.file}: tensor {self.name(part)} is {tensor.dtype} "
            f"{list(tensor.shape or ())}, but {why}; the checkpoint is damaged, or its "
            "configuration is of another one"
        )


_Described = tuple[tuple[int, int], StoredLinear | None]


def _gptq(parts: Parts) -> _Described:
    words, rows = parts.shape("qweight", 2, "I32")
    if parts.has(NARROW_PART):
        return _narrow(parts, words, rows)
    groups, zero_words = parts.shape("qzeros", 2, "I32")
    columns = parts.shape("g_idx", 1, "I32", "I64")[0] if parts.has("g_idx") else None
    by_zeros = bits_of_words(zero_words, rows)
    bits = by_zeros if columns is None else bits_of_words(words, columns)
    if bits is None:
        count, part = (rows, "qzeros") if columns is None else (columns, "qweight")
        known = ", ".join(map(str, OWN_BITS))
        parts.refuse(part, f"{count} codes fill so many words at none of {known} bits")
    columns = words * WORD_BITS // bits if columns is None else columns
    parts.check("scales", (groups, rows), *FLOATS)
    parts.check("qzeros", (groups, -(-rows * bits // WORD_BITS)), "I32")
    return (rows, columns), StoredLinear(bits, -(-columns // groups))


def _narrow(parts: Parts, words: int, rows: int) -> _Described:
    _, entries, _ = parts.shape(NARROW_PART, 3, "U8")
    columns = (entries - 1) * NARROW_GROUP
    parts.check(NARROW_PART, (rows, entries, 2), "U8")
    bits = bits_of_words(words, columns)
    if bits is None:
        parts.refuse("qweight", f"{columns} codes fill other words")
    return (rows, columns), StoredLinear(bits, NARROW_GROUP, ScaleForm.NARROW)


def _awq(parts: Parts) -> _Described:
    columns, words = parts.shape("qweight", 2, "I32")
    rows = words * _AWQ_CODES
    groups, _ = parts.shape("scales", 2, *FLOATS)
    parts.check("scales", (groups, rows), *FLOATS)
    parts.check("qzeros", (groups, words), "I32")
    if columns % groups:
        parts.refuse("scales", f"{columns} inputs are not divided into {groups} groups evenly")
    return (rows, columns), StoredLinear(parts.config.bits, columns // groups)


def _packed(parts: Parts) -> _Described:
    rows, words = parts.shape("weight_packed", 2, "I32")
    bits = parts.scheme.bits
    if bits == FULL_BITS:
        parts.refuse("weight_packed", "config_groups has no integers for this module")
    columns, size = words * WORD_BITS // bits, parts.scheme.group_size
    if size != WHOLE_ROW:  # the last word may not be full
        columns = parts.shape("weight_scale", 2, *FLOATS)[1] * size
    if -(-columns * bits // WORD_BITS) != words:
        parts.refuse("weight_packed", f"{columns} inputs at {bits} bits fill other words")
    groups = _groups(parts, rows, columns)
    parts.check("weight_shape", (2,), "I64", "I32")
    if parts.has("weight_zero_point") or not parts.scheme.symmetric:
        parts.check("weight_zero_point", (-(-rows * bits // WORD_BITS), groups), "I32")
    if parts.has("weight_g_idx"):
        parts.check("weight_g_idx", (columns,), "I32", "I64")
    return (rows, columns), StoredLinear(bits, columns // groups)


def _groups(parts: Parts, rows: int, columns: int) -> int:
    """The number of groups of a row of integer codes: one where all rows share a scale."""
    size = parts.scheme.group_size
    groups = 1 if size == WHOLE_ROW else columns // size
    if columns % groups or (size != WHOLE_ROW and columns % size):
        parts.refuse("weight_scale", f"{columns} inputs are not divided into groups of {size}")
    shape = parts.tensors["weight_scale"].shape if parts.has("weight_scale") else None
    alone = groups == 1 and shape is not None and math.prod(shape) == 1
    parts.check("weight_scale", shape if alone and shape is not None else (rows, groups), *FLOATS)
    return groups


def _fp4(parts: Parts) -> _Described:
    rows, half = parts.shape(codes_part(parts.tensors), 2, "U8")
    _, groups = parts.shape("weight_scale", 2, "F8_E4M3", "U8", "F8_E8M0", *FLOATS)
    if 2 * half % groups:
        parts.refuse("weight_scale", f"{2 * half} inputs are not divided into {groups} groups")
    kind = str(parts.tensors["weight_scale"].dtype)
    parts.check("weight_scale", (rows, groups), kind)
    usual = WHOLE_SCALES[parts.config.method == MODELOPT]
    whole = next(filter(parts.has, WHOLE_SCALES), usual if kind == "F8_E4M3" else None)
    if whole is not None:
        is_single = parts.has(whole) and parts.tensors[whole].shape == ()
        parts.check(whole, () if is_single else (1,), "F32")
    return (rows, 2 * half), None


def _signed4(parts: Parts) -> _Described:
    rows, half = parts.shape("weight", 2, "I8")
    groups, _ = parts.shape("weight_scale", 2, *FLOATS)
    if 2 * half % groups:
        parts.refuse("weight_scale", f"{2 * half} inputs are not divided into {groups} groups")
    for part in ("weight_scale", "weight_zero_point"):
        parts.check(part, (groups, rows), *FLOATS)
    return (rows, 2 * half), None


def _integers(parts: Parts) -> _Described:
    rows, columns = parts.shape("weight", 2, "I8")
    bits = parts.scheme.bits
    if bits == FULL_BITS:
        parts.refuse("weight", "its configuration has no integers for this module")
    if parts.has(INT8_SCALES):
        parts.check(INT8_SCALES, (rows,), "F32")
        return (rows, columns), StoredLinear(bits, columns)
    groups = _groups(parts, rows, columns)
    if parts.has("weight_zero_point") or not parts.scheme.symmetric:
        shape = parts.tensors["weight_scale"].shape or ()
        parts.check("weight_zero_point", shape, "I8", "I32", "I64")
    return (rows, columns), StoredLinear(bits, columns // groups)


def _scaled(parts: Parts) -> _Described:
    rows, columns = parts.shape("weight", 2, "F8_E4M3")
    part = next((each for each in SCALES if parts.has(each)), SCALES[-1])
    types = (*FLOATS, "F8_E8M0", "U8")
    shape = parts.tensors[part].shape or () if parts.has(part) else ()
    parts.shape(part, len(shape), *types)
    known = [(), (1,), (1, 1), (rows,), (rows, 1)]
    if parts.scheme.block is not None:
        each = zip((rows, columns), parts.scheme.block, strict=True)
        known = [tuple(-(-size // block) for size, block in each)]
    if shape not in known:
        wanted = "a scale for all, or one a row" if len(known) > 1 else f"{list(known[0])}"
        parts.refuse(part, f"{wanted} by the configuration, of weights {[rows, columns]}, is read")
    return (rows, columns), None


@dataclass(frozen=True)
class Blocks:
    """How the weights of bitsandbytes were cut: `size` of them share a maximum, and `nested` of
    these another one, to which `offset` is added.
    """

    shape: tuple[int, int]
    size: int
    nested: int = 0
    offset: float = 0.0

    @classmethod
    def parse(cls, content: bytes) -> Blocks:
        """ValueError, TypeError or KeyError for other content."""
        values = loads(content)
        rows, columns = values["shape"]
        nested = values.get("nested_blocksize", 0)
        numbers = (rows, columns, values["blocksize"], nested)
        if not all(type(each) is int for each in numbers) or min(numbers[:3]) < 1 or nested < 0:
            raise ValueError(f"sizes {numbers}")
        offset = float(values.get("nested_offset", 0))
        if not math.isfinite(offset):
            raise ValueError(f"nested_offset {offset}")
        return cls((rows, columns), values["blocksize"], nested, offset)


def _table(parts: Parts) -> _Described:
    part = next(each for each in STATES if parts.has(each))
    (length,) = parts.shape(part, 1, "U8")
    try:
        name = f"{parts.stem}.{part}"
        blocks = Blocks.parse(stored_bytes(parts.folder / parts.tensors[part].file, name))
    except (ValueError, TypeError, KeyError, AttributeError):
        parts.refuse(part, f"its {length} bytes are no JSON with shape and blocksize")
    count = math.prod(blocks.shape)
    parts.check("weight", (-(-count // 2), 1), "U8")
    parts.check("weight.quant_map", (16,), "F32")
    maxima = -(-count // blocks.size)
    if not blocks.nested:
        parts.check("weight.absmax", (maxima,), "F32")
        return blocks.shape, None
    parts.check("weight.absmax", (maxima,), "U8")
    parts.check("weight.nested_absmax", (-(-maxima // blocks.nested),), "F32")
    parts.check("weight.nested_quant_map", (256,), "F32")
    return blocks.shape, None


FORMS: dict[str, Callable[[Parts], _Described]] = {
    GPTQ_FORM: _gptq,
    AWQ_FORM: _awq,
    PACKED: _packed,
    FP4: _fp4,
    INTEGERS: _integers,
    SCALED: _scaled,
    SIGNED4: _signed4,
    TABLE: _table,
}
