"""The tensors of a GGUF model, each mapped, put in order and dequantized when it is asked for."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import torch

from quant.checkpoint.gguf.folder import GgufIndex, GgufTensor
from quant.checkpoint.gguf.header import BFLOAT16, UNPACKED, dequantize
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
        tensor = self._index.tensors[name]
        return FileRange(self._index.paths[tensor.part], tensor.start, tensor.stop)

    def read(self, name: str) -> torch.Tensor:
        """Return plain numbers as stored, blocks in float32; it may be a view of the file: copy it
        to keep it, never write to it. CheckpointError for a file that cannot be mapped.
        """
        tensor = self._index.tensors[name]
        found = self._read(tensor)
        return found.float() - 1 if tensor.order == "plus one" else found

    def _read(self, tensor: GgufTensor) -> torch.Tensor:
        rows = self._rows(tensor)
        if tensor.type_name in UNPACKED:
            plain = rows.view(UNPACKED[tensor.type_name]).reshape(tensor.shape)
            return torch.from_numpy(plain)
        if tensor.type_name == BFLOAT16:
            halves = rows.view(np.int16).reshape(tensor.shape)
            return torch.from_numpy(halves).view(torch.bfloat16)
        return _dequantized(rows, tensor)

    def _rows(self, tensor: GgufTensor) -> Bytes:
        """Bytes [rows, bytes of a row] in transformers' order; a vector is one row, unless its
        elements are reordered.
        """
        stored = self._mapped(tensor.part)[tensor.start : tensor.stop]
        if tensor.order in ("as stored", "plus one"):
            return stored.reshape(math.prod(tensor.shape[:-1]), -1)
        count = tensor.shape[0]
        parts = 2 if tensor.order == "rotary" else 3
        if count % (parts * tensor.groups) or len(stored) % count:
            raise CheckpointError(
                f"{self._index.paths[tensor.part]}: tensor {tensor.stored_name} has {count} rows, "
                f"{len(stored)} bytes, which are not those of {tensor.groups} heads"
            )
        each = count // tensor.groups // parts
        numbers = np.arange(count)
        if tensor.order == "rotary":  # pairs of neighbours become halves of a head
            order = numbers.reshape(tensor.groups, each, parts).swapaxes(1, 2)
        else:  # all queries, keys and values become those of each head
            order = numbers.reshape(parts, tensor.groups, each).swapaxes(0, 1)
        return stored.reshape(count, -1)[order.reshape(-1)]

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


def _dequantized(rows: Bytes, tensor: GgufTensor) -> torch.Tensor:
    values = torch.empty(len(rows), tensor.shape[-1])
    step = max(1, _ELEMENTS_AT_ONCE // tensor.shape[-1])
    for start in range(0, len(rows), step):
        some = dequantize(rows[start : start + step], tensor.type_name)
        values[start : start + step] = torch.from_numpy(some)
    return values.reshape(tensor.shape)
