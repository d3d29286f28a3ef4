"""A micro-batch with its hidden states, or its sampled tokens, as one message of plain bytes.

A message is a prefix of fixed size, int64 arrays, the admissions as JSON, and the tensor, which
begins at a multiple of 64 bytes. Nothing in it is ever run: no pickle.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.messages import Admission, FinishReason, MicroBatch, Sampled, Sampling, TokenIds

_PREFIX = struct.Struct("<QQQQQQQd")
"""Bytes of the whole message, kind, requests, bytes of JSON, dtype, rows, columns, when an emulated
link brings it."""

_BATCH, _SAMPLED = 0, 1
_ALIGNMENT = 64
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length", "error")


def encode(batch: MicroBatch, result: Tensor | Sampled, ready_at_s: float = 0.0) -> Tensor:
    """A message `[bytes]` of uint8 on the host: `batch` with hidden states `[tokens, hidden_size]`,
    or just its sampled tokens; `ready_at_s` as in `MicroBatch`.
    """
    if isinstance(result, Sampled):
        codes = np.array([_REASONS.index(r) for r in result.finish_reasons], dtype=np.int64)
        return _message(_SAMPLED, (result.token_ids, codes), b"", None, ready_at_s)
    admitted = json.dumps([_to_json(admission) for admission in batch.admitted]).encode()
    arrays = (batch.slots, batch.starts, batch.counts)
    text = admitted if batch.admitted else b""
    return _message(_BATCH, arrays, text, result, ready_at_s)


def message_bytes(first_frame: Tensor) -> int:
    """Length of the message that begins with `first_frame`."""
    return int(_PREFIX.unpack_from(first_frame.numpy().data)[0])


def decode(message: Tensor) -> tuple[MicroBatch, Tensor] | Sampled:
    """What was encoded; its tensor is a view of `message`."""
    data = message.numpy()
    _, kind, requests, text_bytes, dtype, rows, columns, ready_at_s = _PREFIX.unpack_from(data.data)
    count = 2 if kind == _SAMPLED else 3
    end = _PREFIX.size + 8 * count * requests
    arrays = data[_PREFIX.size : end].view(np.int64).reshape(count, requests).copy()
    if kind == _SAMPLED:
        return Sampled(arrays[0], tuple(_REASONS[code] for code in arrays[1]), ready_at_s)
    text = data[end : end + text_bytes].tobytes()
    admitted = tuple(_from_json(each) for each in json.loads(text)) if text else ()
    begin = _aligned(end + text_bytes)
    size = rows * columns * _DTYPES[dtype].itemsize
    hidden = message[begin : begin + size].view(_DTYPES[dtype]).reshape(rows, columns)
    return MicroBatch(arrays[0], arrays[1], arrays[2], admitted, ready_at_s), hidden


def _message(
    kind: int, arrays: Sequence[TokenIds], text: bytes, tensor: Tensor | None, ready_at_s: float
) -> Tensor:
    flat = np.concatenate(arrays).view(np.uint8)
    end = _PREFIX.size + flat.size + len(text)
    begin = _aligned(end)
    tensor = torch.empty(0, 0) if tensor is None else tensor.detach()
    rows, columns = tensor.shape
    message = host_memory(begin + tensor.nbytes)
    data = message.numpy()
    dtype = _DTYPES.index(tensor.dtype)
    prefix = (len(data), kind, len(arrays[0]), len(text), dtype, rows, columns, ready_at_s)
    _PREFIX.pack_into(data.data, 0, *prefix)
    data[_PREFIX.size : _PREFIX.size + flat.size] = flat
    data[end - len(text) : end] = np.frombuffer(text, np.uint8)
    data[end:begin] = 0
    message[begin:].view(tensor.dtype).view(rows, columns).copy_(tensor)
    return message


def host_memory(size: int) -> Tensor:
    """`[size]` bytes of uint8; pinned where this process computes on a GPU, which copies from and
    to such memory twice as fast and without a detour. Torch keeps freed blocks for the next ones.
    """
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _to_json(admission: Admission) -> dict[str, Any]:
    return asdict(admission)


def _from_json(values: dict[str, Any]) -> Admission:
    sampling = values.pop("sampling")
    sampling["stop"] = tuple(sampling["stop"])
    values |= {name: tuple(values[name]) for name in ("generated", "prompt_tokens")}
    return Admission(sampling=Sampling(**sampling), **values)
