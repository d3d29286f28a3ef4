"""The tensors of a GGUF model, each mapped, put in order and dequantized when it is asked for."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from quant.checkpoint.coded_weights import BLOCKS, NUMBERS, CodedWeight
from quant.checkpoint.codes import GroupCodes
from quant.checkpoint.gguf.blocks import (
    BESIDE_BITS,
    CODES,
    GROUP,
    SUPER_CODES,
    Blocks,
    SuperBlocks,
    stored_linears,
)
from quant.checkpoint.gguf.folder import GgufIndex, GgufTensor, StoredPart
from quant.checkpoint.gguf.header import BFLOAT16, UNPACKED, dequantize
from quant.checkpoint.gguf.orders import Rows, row_order, untiled
from quant.checkpoint.read_ahead import FileRange
from quant.checkpoint.stored_config import Scheme
from quant.common.errors import CheckpointError
from quant.devices import ranges
from quant.super_blocks import decode_scales

_ELEMENTS_AT_ONCE = 1 << 22
"""Elements dequantized at once: the package makes several arrays of their size on its way."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class GgufTensors:
    def __init__(self, index: GgufIndex) -> None:
        index.check_unchanged()
        self._index = index
        self._content: dict[int, Bytes] = {}
        self.file_of = {n: str(index.paths[each.part]) for n, each in index.tensors.items()}

    def check(self) -> None:
        self._index.check_unchanged()

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._index.tensors[name].shape

    def range_of(self, name: str) -> FileRange:
        """Where a tensor lies, or the first of those that it is joined of."""
        source = self._index.tensors[name].sources[0]
        return FileRange(self._index.paths[source.part], source.start, source.stop)

    def read(self, name: str) -> torch.Tensor:
        """Return plain numbers as stored, blocks in float32; it may be a view of the file: copy it
        to keep it, never write to it. CheckpointError for a file that cannot be mapped.
        """
        tensor = self._index.tensors[name]
        first, rows = tensor.sources[0], self._order(tensor)
        if len(tensor.sources) == 1:
            found = self._read(first, rows)
        else:
            found = _joined([self._read(each).float() for each in tensor.sources], tensor.order)
            found = found if rows is None else found[torch.from_numpy(rows)]
        try:
            return _changed(found, tensor).reshape(tensor.shape)
        except ValueError as error:
            raise CheckpointError(
                f"{self._index.paths[first.part]}: tensor {first.stored_name} has "
                f"{found.shape[-1]} columns, which are not those of {error}"
            ) from error

    def coded(self, name: str) -> CodedWeight | None:
        """How a weight is stored of a layer whose codes are kept; None: it is of no such layer."""
        linear, tensor = stored_linears(self._index).get(name), self._index.tensors[name]
        if linear is None:
            return None
        form, (rows, columns) = BLOCKS if linear.bits != BESIDE_BITS else NUMBERS, tensor.shape
        return CodedWeight(name.removesuffix(".weight"), form, Scheme(), (rows, columns), linear)

    def read_codes(self, coded: CodedWeight, kept: slice | list[int]) -> GroupCodes:
        """Read the `kept` rows of a matrix of BLOCKS."""
        tensor = self._index.tensors[f"{coded.stem}.weight"]
        parts = [self._bytes(each).reshape(each.shape[0], -1) for each in tensor.sources]
        stored = parts[0] if len(parts) == 1 else np.concatenate(parts)
        order = self._order(tensor)
        rows = stored[kept] if order is None else stored[order[kept]]
        assert coded.linear is not None, "asked of codes"
        type_name, bits = tensor.sources[0].type_name, coded.linear.bits
        if type_name in SUPER_CODES:
            found = _super_blocks(rows, tensor.shape[1], bits, SUPER_CODES[type_name])
        else:
            found = _pairs(rows, tensor.shape[1], bits, CODES[type_name])
        found.check_finite(f"tensor {coded.stem} in {self._index.paths[tensor.part]}")
        return found

    def _order(self, tensor: GgufTensor) -> Rows | None:
        first, count = tensor.sources[0], sum(source.shape[0] for source in tensor.sources)
        try:
            return row_order(tensor.order, tensor.numbers, count)
        except ValueError as error:
            raise CheckpointError(
                f"{self._index.paths[first.part]}: tensor {first.stored_name} has {count} rows, "
                f"which are not those of {error}"
            ) from error

    def _bytes(self, source: StoredPart) -> Bytes:
        return self._mapped(source.part)[source.start : source.stop]

    def _read(self, source: StoredPart, order: Rows | None = None) -> torch.Tensor:
        stored = self._bytes(source)
        if order is None:
            rows = stored.reshape(math.prod(source.shape[:-1]), -1)
        else:  # a vector is one row, unless its elements are moved
            rows = stored.reshape(len(order), -1)[order]
        if source.type_name in UNPACKED:
            plain = rows.view(UNPACKED[source.type_name]).reshape(source.shape)
            return torch.from_numpy(plain)
        if source.type_name == BFLOAT16:
            halves = rows.view(np.int16).reshape(source.shape)
            return torch.from_numpy(halves).view(torch.bfloat16)
        return _dequantized(rows, source)

    def _mapped(self, part: int) -> Bytes:
        if part not in self._content:
            path = self._index.paths[part]
            try:
                with path.open("rb") as file:
                    # Private, so that torch takes what it must not write to for writable.
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
            self._content[part] = np.frombuffer(mapped, np.uint8)
        return self._content[part]


def _pairs(rows: Bytes, columns: int, bits: int, decode: Callable[[Bytes], Blocks]) -> GroupCodes:
    codes, scales, lows = torch.empty(len(rows), columns, dtype=torch.uint8), [], []
    for block in ranges(len(rows), max(1, _ELEMENTS_AT_ONCE // columns)):
        own, each, low = decode(rows[block])
        codes[block] = torch.from_numpy(own)
        scales.append(torch.from_numpy(each))
        lows += [] if low is None else [torch.from_numpy(low)]
    scale = torch.cat(scales)
    return GroupCodes(
        codes=codes,
        scale=scale,
        zero=torch.full(scale.shape, 0 if lows else 1 << (bits - 1), dtype=torch.uint8),
        group_of_column=torch.arange(columns, dtype=torch.int32) // GROUP,
        bits=bits,
        low=torch.cat(lows) if lows else None,
    )


def _super_blocks(
    rows: Bytes, columns: int, bits: int, decode: Callable[[Bytes], SuperBlocks]
) -> GroupCodes:
    codes, blocks = torch.empty(len(rows), columns, dtype=torch.uint8), list[torch.Tensor]()
    for block in ranges(len(rows), max(1, _ELEMENTS_AT_ONCE // columns)):
        own, each = decode(rows[block])
        codes[block] = torch.from_numpy(own)
        blocks.append(torch.from_numpy(each).view(torch.int8))
    held = torch.cat(blocks)
    scale, low = decode_scales(held, bits)
    group = columns // scale.shape[1]
    return GroupCodes(
        codes=codes,
        scale=scale,
        zero=torch.zeros(scale.shape, dtype=torch.uint8),
        group_of_column=torch.arange(columns, dtype=torch.int32) // group,
        bits=bits,
        low=low,
        held=held,
    )


def _changed(values: torch.Tensor, tensor: GgufTensor) -> torch.Tensor:
    """Give numbers of transformers for those of the file."""
    if tensor.change == "plus one":
        return values.float() - 1
    if tensor.change == "decay":
        return values.float().neg().log()
    if tensor.change == "tiled columns":
        return values[:, torch.from_numpy(untiled(values.shape[1], *tensor.numbers))]
    return values


def _joined(parts: list[torch.Tensor], order: str) -> torch.Tensor:
    if order == "interleaved":
        return torch.stack(parts, -1).flatten(-2)
    if order == "keys and values":
        keys, values = parts
        return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)
    return torch.cat(parts)


def _dequantized(rows: Bytes, source: StoredPart) -> torch.Tensor:
    values = torch.empty(len(rows), source.shape[-1])
    step = max(1, _ELEMENTS_AT_ONCE // source.shape[-1])
    for start in range(0, len(rows), step):
        some = dequantize(rows[start : start + step], source.type_name)
        values[start : start + step] = torch.from_numpy(some)
    return values.reshape(source.shape)
