"""Keys and values of several requests as one message of plain bytes, from a stage that prefills to
one that decodes.

A message is a prefix of fixed size, heads and width in each layer that has keys and values, a key
and a number of tokens for each request, and the tensors of one request after the other. Nothing in
it is ever run: no pickle. The sizes that it states are checked against its length before anything
is read; who takes the tensors checks their form.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.messages import KvPart
from actors.transport.message_limits import refuse

_PREFIX = struct.Struct("<QQQQQQQQ")
"""First layer, layer after the last, first head, head after the last, layers with keys and values,
dtype of the numbers, of the scales (`_NONE`: there are none), requests."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
_NONE = len(_DTYPES)
_MOST = 2**32


_Pairs = Sequence[Sequence[int]]


class _Prefix(NamedTuple):
    """The fields of `_PREFIX`."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int
    holding_layers: int
    dtype: int
    scale_dtype: int
    requests: int

    @property
    def part(self) -> KvPart:
        return KvPart(
            range(self.first_layer, self.end_layer), range(self.first_head, self.end_head)
        )

    def forms(self, heads: _Pairs, tokens: int) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of every tensor of a request."""
        for count, width in (*heads, *heads):
            yield (count, tokens, width), _DTYPES[self.dtype]
            if self.scale_dtype != _NONE:
                yield (count, tokens), _DTYPES[self.scale_dtype]

    def token_bytes(self, heads: _Pairs) -> int:
        """Bytes of one token of a request."""
        scale = 0 if self.scale_dtype == _NONE else _DTYPES[self.scale_dtype].itemsize
        number = _DTYPES[self.dtype].itemsize
        return 2 * sum(count * (width * number + scale) for count, width in heads)


def encode_kv(part: KvPart, requests: Mapping[int, Sequence[Tensor]]) -> Tensor:
    """A message `[bytes]` of uint8 with the `part` of each request's keys and values, by key.

    Its tensors `[heads, tokens, ...]`: for each layer that has them the numbers of the keys, their
    scales where there are some, then those of the values.
    """
    each = list(requests.values())
    first = each[0] if each else []
    numbers = [tensor for tensor in first if tensor.dim() == 3]
    is_coded = len(numbers) < len(first)
    heads = [[t.shape[0], t.shape[2]] for t in numbers[: len(numbers) // 2]]
    prefix = _Prefix(
        part.layers.start,
        part.layers.stop,
        part.heads.start,
        part.heads.stop,
        len(heads),
        _DTYPES.index(first[0].dtype) if first else 0,
        _DTYPES.index(first[1].dtype) if is_coded else _NONE,
        len(each),
    )
    counts = [[key, tensors[0].shape[1]] for key, tensors in requests.items()]
    table = np.array([*heads, *counts], dtype=np.int64).view(np.uint8).ravel()
    end = _PREFIX.size + table.size
    size = prefix.token_bytes(heads) * sum(tokens for _, tokens in counts)
    message = torch.empty(end + size, dtype=torch.uint8)
    _PREFIX.pack_into(message.numpy().data, 0, *prefix)
    message[_PREFIX.size : end] = torch.from_numpy(table)
    for tensor in (tensor for tensors in each for tensor in tensors):
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        message[end : end + len(flat)] = flat
        end += len(flat)
    assert end == len(message), "tensors are those of the part"
    return message


def decode_kv(message: Tensor) -> tuple[KvPart, dict[int, list[Tensor]]]:
    """The content of an encoded `message`, in tensors of its own.

    Raises `StageLostError` for what no stage sends.
    """
    data = message.numpy()
    if len(data) < _PREFIX.size:
        refuse(f"has {len(data)} bytes")
    prefix = _Prefix(*_PREFIX.unpack_from(data.data))
    end = _PREFIX.size + 16 * (prefix.holding_layers + prefix.requests)
    if (
        prefix.dtype >= len(_DTYPES)
        or prefix.scale_dtype > _NONE
        or not prefix.first_layer < prefix.end_layer < _MOST
        or not prefix.first_head < prefix.end_head < _MOST
        or prefix.holding_layers > prefix.end_layer - prefix.first_layer
        or (prefix.requests and not prefix.holding_layers)
        or end > len(data)
    ):
        refuse("brings keys and values of a form that there is not")
    table = data[_PREFIX.size : end].copy().view(np.int64).reshape(-1, 2).tolist()
    heads, counts = table[: prefix.holding_layers], table[prefix.holding_layers :]
    sizes = [*(size for each in heads for size in each), *(tokens for _, tokens in counts)]
    size = prefix.token_bytes(heads) * sum(tokens for _, tokens in counts)
    if any(not 0 < each < _MOST for each in sizes) or len(data) != end + size:
        refuse(f"has {len(data)} bytes, which are not the keys and values that it tells of")
    found: dict[int, list[Tensor]] = {}
    for key, tokens in counts:
        found[key] = []
        for shape, dtype in prefix.forms(heads, tokens):
            size = int(np.prod(shape)) * dtype.itemsize
            raw = torch.from_numpy(data[end : end + size].copy())
            found[key].append(raw.view(dtype).view(shape))
            end += size
    return prefix.part, found
