"""The tensors of a GGUF model, each mapped, put in order and dequantized when it is asked for."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import torch

from quant.checkpoint.gguf.folder import GgufIndex, GgufTensor, StoredPart
from quant.checkpoint.gguf.header import BFLOAT16, UNPACKED, dequantize
from quant.checkpoint.gguf.orders import Rows, row_order, untiled
from quant.checkpoint.read_ahead import FileRange
from quant.common.errors import CheckpointError

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
        first = tensor.sources[0]
        count = sum(source.shape[0] for source in tensor.sources)
        try:
            rows = row_order(tensor.order, tensor.numbers, count)
        except ValueError as error:
            raise CheckpointError(
                f"{self._index.paths[first.part]}: tensor {first.stored_name} has {count} rows, "
                f"which are not those of {error}"
            ) from error
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

    def _read(self, source: StoredPart, order: Rows | None = None) -> torch.Tensor:
        stored = self._mapped(source.part)[source.start : source.stop]
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
