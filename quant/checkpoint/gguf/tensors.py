"""The header of a GGUF file: its metadata, and types, shapes and byte ranges of its tensors.

Headers hold the vocabulary, hundreds of thousands of short texts, for each of which
`gguf.GGUFReader` makes four numpy views: 12 s for SmolLM2 where this takes 0.2 s (two cores, both
busy). Block sizes and dequantization are those of the library.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import torch

from quant.checkpoint.gguf.files import GgufIndex, GgufTensor
from quant.checkpoint.gguf.header import BFLOAT16, UNPACKED, dequantize
from quant.checkpoint.read_ahead import FileRange
from quant.common.errors import CheckpointError

_TEXT, _ARRAY = 8, 9


_ELEMENTS_AT_ONCE = 1 << 22
"""Elements dequantized at once: the package makes several arrays of their size on its way."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class GgufTensors:
    """The tensors of `index`, whose files are mapped; `CheckpointError` where one was changed."""

    def __init__(self, index: GgufIndex) -> None:
        index.check_unchanged()
        self._index = index
        self._content: dict[int, Bytes] = {}
        self.file_of = {n: str(index.paths[each.part]) for n, each in index.tensors.items()}

    def check(self) -> None:
        """Raise `CheckpointError` where a file was changed since its header was read."""
        self._index.check_unchanged()

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor `name`."""
        return self._index.tensors[name].shape

    def range_of(self, name: str) -> FileRange:
        """The file and bytes of the tensor `name`."""
        tensor = self._index.tensors[name]
        return FileRange(self._index.paths[tensor.part], tensor.start, tensor.stop)

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`: one of plain numbers as it is stored, one of blocks in float32.

        It may be a view of the file: copy it to keep it, and do not write to it. Raises
        `CheckpointError` for a file that cannot be mapped, and for rows that belong to no heads.
        """
        tensor = self._index.tensors[name]
        rows = self._rows(tensor)
        if tensor.type_name in UNPACKED:
            plain = rows.view(UNPACKED[tensor.type_name]).reshape(tensor.shape)
            return torch.from_numpy(plain)
        if tensor.type_name == BFLOAT16:
            halves = rows.view(np.int16).reshape(tensor.shape)
            return torch.from_numpy(halves).view(torch.bfloat16)
        return _dequantized(rows, tensor)

    def _rows(self, tensor: GgufTensor) -> Bytes:
        """The bytes [rows, bytes of a row] in transformers' order; all of a vector are one row,
        unless its elements have another order.
        """
        stored = self._mapped(tensor.part)[tensor.start : tensor.stop]
        if tensor.order == "as stored":
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
    """The blocks in `rows` as float32 of the tensor's shape."""
    values = torch.empty(len(rows), tensor.shape[-1])
    step = max(1, _ELEMENTS_AT_ONCE // tensor.shape[-1])
    for start in range(0, len(rows), step):
        some = dequantize(rows[start : start + step], tensor.type_name)
        values[start : start + step] = torch.from_numpy(some)
    return values.reshape(tensor.shape)
