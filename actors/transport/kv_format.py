"""Keys and values of several requests, and their constant states, as one message of plain bytes,
from a stage that prefills to one that decodes.

A message is a prefix of fixed size, and for each request what it is called, the form of each of its
tensors, and these. Nothing in it is ever run: no pickle. The sizes that it states are checked
against its length before anything is read; who takes the tensors checks their form.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.messages import KvPart
from actors.transport.message_limits import refuse

_PREFIX = struct.Struct("<5Q")
"""First layer, layer after the last, first head, head after the last, requests."""

_REQUEST = struct.Struct("<QQQ")
"""Key, tokens, and tensors of a request."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
_MOST = 2**32
_MOST_DIMENSIONS = 4
_FORM_BYTES = 8 * (1 + _MOST_DIMENSIONS)
"""Of the type of a tensor and its sizes, 0 where it has fewer dimensions."""

Held = tuple[int, tuple[Tensor, ...]]
"""Tokens of a request, and the tensors that are held of them."""


def encode_kv(part: KvPart, requests: Mapping[int, Held]) -> Tensor:
    """A message `[bytes]`, uint8: the `part` of each request's keys, values, states."""
    ends = part.layers.start, part.layers.stop, part.heads.start, part.heads.stop
    pieces: list[Any] = [_PREFIX.pack(*ends, len(requests))]
    for key, (tokens, tensors) in requests.items():
        forms = np.zeros((len(tensors), 1 + _MOST_DIMENSIONS), dtype=np.int64)
        for form, tensor in zip(forms, tensors, strict=True):
            form[0], form[1 : 1 + tensor.dim()] = _DTYPES.index(tensor.dtype), tensor.shape
        pieces += [_REQUEST.pack(key, tokens, len(tensors)), forms.tobytes()]
        pieces += [tensor.contiguous().view(-1).view(torch.uint8).numpy() for tensor in tensors]
    return torch.frombuffer(bytearray().join(pieces), dtype=torch.uint8)


def decode_kv(message: Tensor) -> tuple[KvPart, dict[int, Held]]:
    """The content of a `message`, in tensors of its own; StageLostError for what none sends."""
    data = message.numpy()
    if len(data) < _PREFIX.size:
        refuse(f"has {len(data)} bytes")
    first_layer, end_layer, first_head, end_head, requests = _PREFIX.unpack_from(data.data)
    if not (first_layer < end_layer < _MOST and first_head < end_head < _MOST):
        refuse("brings keys and values of a form that there is not")
    found: dict[int, Held] = {}
    end = _PREFIX.size
    for _ in range(min(requests, len(data))):
        key, copies, end = _decode_request(data, end)
        found[key] = copies
    if len(found) != requests or end != len(data):
        refuse(f"has {len(data)} bytes, which are not the keys and values that it tells of")
    return KvPart(range(first_layer, end_layer), range(first_head, end_head)), found


def _decode_request(data: Any, start: int) -> tuple[int, Held, int]:
    """The request that begins at `start`: its key, its tensors, and where the next one begins."""
    begin = start + _REQUEST.size
    if begin > len(data):
        refuse(f"ends at byte {len(data)}, before its last request")
    key, tokens, tensors = _REQUEST.unpack_from(data.data, start)
    end = begin + tensors * _FORM_BYTES
    if not (0 < tokens < _MOST and tensors > 0 and end <= len(data)):
        refuse("brings keys and values of a form that there is not")
    copies = []
    for dtype, *sizes in data[begin:end].copy().view(np.int64).reshape(tensors, -1).tolist():
        shape = [size for size in sizes if size]
        if not (0 <= dtype < len(_DTYPES) and shape and all(0 < size < _MOST for size in shape)):
            refuse("brings keys and values of a form that there is not")
        own = _DTYPES[dtype]
        begin, end = end, end + math.prod(shape) * own.itemsize
        if end > len(data):
            refuse(f"ends at byte {len(data)}, before its last tensor")
        copies.append(torch.from_numpy(data[begin:end].copy()).view(own).view(shape))
    return key, (tokens, tuple(copies)), end
