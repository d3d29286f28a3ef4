"""A micro-batch with its hidden states, or its sampled tokens, as one message of plain bytes.

A message is a prefix of fixed size, int64 arrays, the admissions as JSON, and the tensor, which
begins at a multiple of 64 bytes; with sampled tokens, it is their log-probabilities, where they are
asked for. Hidden states that go from GPU to GPU are not in it, but their sizes are. Nothing in it
is ever run: no pickle. Nothing in it is trusted either: the sizes that it states are checked
against the plan before memory is allocated for it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.logprobs import MOST_TOP_LOGPROBS, NO_TOKEN, LogprobRows, check_top_logprobs
from actors.messages import (
    Admission,
    FinishReason,
    MicroBatch,
    Move,
    Park,
    Sampled,
    Sampling,
    TokenIds,
    TokenRange,
)
from actors.transport.message_limits import (
    ADMISSION_BYTES,
    MOST_ROWS,
    Limits,
    check_batch,
    refuse,
)
from actors.transport.nccl import GpuLink
from quant.common.errors import LlmpqError
from quant.common.json_text import loads

_MOST_COLUMNS = 1 + MOST_TOP_LOGPROBS
_NO_IDS: TokenIds = np.zeros(0, dtype=np.int64)


def logprob_arrays(asked: LogprobRows | None) -> tuple[TokenIds, Tensor | None]:
    """Ids, flat, and values `[asked, 1 + most]` in float32.

    The first columns have the places of the tokens, their ranks, and the values of those that were
    chosen, the others the most probable tokens.
    """
    if asked is None:
        return _NO_IDS, None
    ids: TokenIds = np.column_stack([asked.rows, asked.ranks, asked.top_ids]).ravel()
    return ids, torch.from_numpy(np.column_stack([asked.chosen, asked.top]))


def check_logprob_sizes(tokens: int, rows: int, columns: int) -> None:
    """Raise `StageLostError` for sizes of log-probabilities that so many tokens do not have."""
    if rows > tokens or columns > _MOST_COLUMNS or bool(rows) != bool(columns):
        refuse(
            f"says {rows} rows of {columns} log-probabilities for {tokens} tokens, each of which "
            f"has at most {_MOST_COLUMNS}"
        )


def logprobs_of(ids: TokenIds, values: Tensor, tokens: int) -> LogprobRows | None:
    """Log-probabilities of some of `tokens`, `values` copied; raises as `check_logprob_sizes`."""
    if not len(values):
        return None
    ids, found = ids.reshape(len(values), -1), values.numpy().copy()
    rows, ranks, top_ids = ids[:, 0], ids[:, 1], ids[:, 2:]
    if rows[0] < 0 or rows[-1] >= tokens or (np.diff(rows) < 1).any():
        refuse("has log-probabilities of tokens that there are not")
    if (top_ids < NO_TOKEN).any() or (ranks < 1).any() or np.isnan(found).any():
        refuse("has log-probabilities that are none")
    return LogprobRows(rows, found[:, 0], ranks, top_ids, found[:, 1:])


_PREFIX = struct.Struct("<QQQQQQQQ")
"""Bytes of the whole message, kind, requests, changes, bytes of JSON, dtype, rows, columns."""

_BATCH, _SAMPLED, _APART = 0, 1, 2  # apart: a micro-batch whose hidden states go over a GPU link
_SAMPLED_ARRAYS = 2  # tokens, reasons
_BATCH_ARRAYS = 7  # slots, starts, counts, begins, samples, sizes, scored
_CHANGE_NUMBERS = 4  # which change, and the fields of a move or of parked tokens
_MOVE, _PARK, _RESTORE, _DROP, _KEEP = range(5)
_ALIGNMENT = 64
_ADMITTED_TOKENS = ("generated", "prompt_tokens", "prompt_end", "prompt_ids")
_OF_LOGPROBS = ("top_logprobs", "prompt_logprobs")
_NO_CHANGES: TokenIds = np.zeros((0, _CHANGE_NUMBERS), dtype=np.int64)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length", "error")


class _Prefix(NamedTuple):
    """The fields of `_PREFIX`."""

    message_bytes: int
    kind: int
    requests: int
    changes: int
    text_bytes: int
    dtype: int
    rows: int
    columns: int

    @property
    def array_bytes(self) -> int:
        if self.kind == _SAMPLED:
            return 8 * (_SAMPLED_ARRAYS * self.requests + self.rows * (self.columns + 1))
        return 8 * (_BATCH_ARRAYS * self.requests + _CHANGE_NUMBERS * self.changes)

    @property
    def tensor_begin(self) -> int:
        return _aligned(_PREFIX.size + self.array_bytes + self.text_bytes)

    @property
    def planned_bytes(self) -> int:
        """Bytes of a message with these parts."""
        if self.kind == _APART:
            return self.tensor_begin
        return self.tensor_begin + self.rows * self.columns * _DTYPES[self.dtype].itemsize


def encode(batch: MicroBatch, result: Tensor | Sampled, link: GpuLink | None = None) -> Tensor:
    """A message `[bytes]` of uint8 on the host: `batch` with hidden states `[tokens, hidden_size]`,
    or just its sampled tokens. `samples` that are all set, and `scored` that are all 0, come out
    as None. Over a `link` hidden states are sent now, and the message is to follow.
    """
    if isinstance(result, Sampled):
        codes = np.array([_REASONS.index(r) for r in result.finish_reasons], dtype=np.int64)
        ids, values = logprob_arrays(result.logprobs)
        return _message(_SAMPLED, (result.token_ids, codes, ids), _NO_CHANGES, b"", values)
    admitted = json.dumps([_to_json(admission) for admission in batch.admitted]).encode()
    samples = np.ones_like(batch.slots) if batch.samples is None else batch.samples.astype(np.int64)
    sizes = np.zeros_like(batch.slots) if batch.sizes is None else batch.sizes
    scored = np.zeros_like(batch.slots) if batch.scored is None else batch.scored
    arrays = (batch.slots, batch.starts, batch.counts, batch.begins, samples, sizes, scored)
    text = admitted if batch.admitted else b""
    if link is None:
        return _message(_BATCH, arrays, _changes(batch), text, result)
    link.send(result)
    return _message(_APART, arrays, _changes(batch), text, result)


def message_bytes(first_frame: Tensor, limits: Limits | None = None) -> int:
    """Length of the message that begins with `first_frame`; raises as `decode`."""
    if not _PREFIX.unpack_from(first_frame.numpy().data)[0]:
        return 0
    return _prefix(first_frame, limits).message_bytes


def decode(
    message: Tensor, limits: Limits | None = None, link: GpuLink | None = None
) -> tuple[MicroBatch, Tensor] | Sampled:
    """The content of an encoded `message`; the tensor is a view of it, or comes over the `link`.

    Raises `StageLostError` for what no stage sends: sizes that disagree or go beyond `limits`,
    slots, positions and ranges that do not exist or that two requests share, admissions that are
    malformed.
    """
    data = message.numpy()
    prefix = _prefix(message, limits)
    if len(data) < prefix.message_bytes:
        refuse(f"has {len(data)} bytes and says {prefix.message_bytes}")
    end = _PREFIX.size + prefix.array_bytes
    numbers = data[_PREFIX.size : end].view(np.int64).copy()
    shape, dtype = (prefix.rows, prefix.columns), _DTYPES[prefix.dtype]
    tensor = message[prefix.tensor_begin : prefix.message_bytes].view(dtype)
    if prefix.kind == _SAMPLED:
        most = _most_scored(prefix.requests, limits)
        return _sampled(numbers, prefix.requests, tensor.reshape(shape), most)
    admitted = _admitted(data[end : end + prefix.text_bytes].tobytes())
    batch = _batch(numbers, prefix.requests, admitted)
    check_batch(batch, prefix.rows, limits)
    if prefix.kind == _BATCH:
        return batch, tensor.reshape(shape)
    if link is None:
        refuse("has hidden states that come from GPU to GPU, over a link that there is not")
    return batch, link.receive(*shape, dtype)


class Codec:
    """The encoding of messages between stages, within `limits`, by real links."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits

    def encode(
        self, batch: MicroBatch, result: Tensor | Sampled, link: GpuLink | None = None
    ) -> Tensor:
        """A message `[bytes]` with the `result` of `batch`."""
        return encode(batch, result, link)

    def decode(
        self, message: Tensor, link: GpuLink | None = None
    ) -> tuple[MicroBatch, Tensor] | Sampled:
        """The content of `message`, when it has arrived."""
        return decode(message, self._limits, link)

    def message_bytes(self, first_frame: Tensor) -> int:
        """Length of the message that begins with `first_frame`; 0: the end of all messages."""
        return message_bytes(first_frame, self._limits)


def _prefix(message: Tensor, limits: Limits | None) -> _Prefix:
    prefix = _Prefix(*_PREFIX.unpack_from(message.numpy().data))
    if prefix.kind not in (_BATCH, _SAMPLED, _APART) or prefix.dtype >= len(_DTYPES):
        refuse(f"says kind {prefix.kind} and dtype {prefix.dtype}")
    is_sampled = prefix.kind == _SAMPLED
    if is_sampled and prefix.changes + prefix.text_bytes + prefix.dtype:
        refuse("brings more than the tokens that it says")
    if is_sampled:
        most = _most_scored(prefix.requests, limits)
        check_logprob_sizes(most, prefix.rows, prefix.columns)
    if not (prefix.requests or is_sampled):
        refuse("is a micro-batch of no requests")
    if prefix.message_bytes != prefix.planned_bytes:
        refuse(f"says {prefix.message_bytes} bytes, of which {prefix.planned_bytes} have a place")
    if limits is not None:
        for what, most in (
            ("requests", limits.requests),
            ("changes", limits.kv_tokens + limits.parked_tokens),
            ("rows", prefix.rows if is_sampled else limits.rows),
            ("columns", prefix.columns if is_sampled else limits.columns),
            ("text_bytes", limits.requests * ADMISSION_BYTES),
        ):
            if getattr(prefix, what) > most:
                refuse(f"says {getattr(prefix, what)} {what}, at most {most} were planned")
    return prefix


def _most_scored(requests: int, limits: Limits | None) -> int:
    """Most rows of log-probabilities where so many `requests` are sampled: theirs, and those of
    prompts.
    """
    return requests + (MOST_ROWS if limits is None else limits.rows)


def _sampled(numbers: TokenIds, requests: int, values: Tensor, most: int) -> Sampled:
    """The tokens of the arrays, and the log-probabilities that follow, of at most so many."""
    end = _SAMPLED_ARRAYS * requests
    token_ids, codes = numbers[:end].reshape(_SAMPLED_ARRAYS, requests)
    if (token_ids < 0).any() or (codes < 0).any() or (codes >= len(_REASONS)).any():
        refuse("has tokens or reasons that there are not")
    reasons = tuple(_REASONS[code] for code in codes)
    return Sampled(token_ids, reasons, logprobs_of(numbers[end:], values, most))


def _batch(numbers: TokenIds, requests: int, admitted: tuple[Admission, ...]) -> MicroBatch:
    """The micro-batch of the arrays and changes that follow the prefix."""
    arrays = numbers[: _BATCH_ARRAYS * requests].reshape(_BATCH_ARRAYS, requests)
    slots, starts, counts, begins, samples, sizes, scored = arrays
    if ((samples != 0) & (samples != 1)).any():
        refuse("does not say whether requests are sampled")
    changes: dict[int, list[list[int]]] = {each: [] for each in range(_KEEP + 1)}
    for kind, *fields in numbers[arrays.size :].reshape(-1, _CHANGE_NUMBERS).tolist():
        if kind not in changes:
            refuse(f"makes a change of kind {kind}")
        changes[kind].append(fields)
    return MicroBatch(
        slots,
        starts,
        counts,
        begins,
        admitted,
        tuple(Move(*fields) for fields in changes[_MOVE]),
        None if samples.all() else samples.astype(np.bool_),
        sizes if sizes.any() else None,
        tuple(Park(*fields) for fields in changes[_PARK]),
        tuple(Park(*fields) for fields in changes[_RESTORE]),
        tuple(key for key, *_ in changes[_DROP]),
        tuple(Park(*fields) for fields in changes[_KEEP]),
        scored if scored.any() else None,
    )


def _changes(batch: MicroBatch) -> TokenIds:
    """What a micro-batch changes in the KV cache and beside it, `[changes, 4]`."""
    rows = [
        *((_MOVE, *astuple(move)) for move in batch.moves),
        *((_PARK, *astuple(park)) for park in batch.parks),
        *((_RESTORE, *astuple(back)) for back in batch.restores),
        *((_DROP, key, 0, 0) for key in batch.drops),
        *((_KEEP, *astuple(keep)) for keep in batch.keeps),
    ]
    return np.array(rows, dtype=np.int64) if rows else _NO_CHANGES


def _message(
    kind: int, arrays: Sequence[TokenIds], changes: TokenIds, text: bytes, tensor: Tensor | None
) -> Tensor:
    flat = np.concatenate([*arrays, changes.ravel()]).view(np.uint8)
    end = _PREFIX.size + flat.size + len(text)
    begin = _aligned(end)
    tensor = torch.empty(0, 0) if tensor is None else tensor.detach()
    rows, columns = tensor.shape
    message = host_memory(begin + (0 if kind == _APART else tensor.nbytes))
    data = message.numpy()
    dtype = _DTYPES.index(tensor.dtype)
    prefix = (len(data), kind, len(arrays[0]), len(changes), len(text), dtype, rows, columns)
    _PREFIX.pack_into(data.data, 0, *prefix)
    data[_PREFIX.size : _PREFIX.size + flat.size] = flat
    data[end - len(text) : end] = np.frombuffer(text, np.uint8)
    data[end:begin] = 0
    if kind != _APART:
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
    """Its fields; those of log-probabilities only where they are asked for."""
    values = asdict(admission)
    return {n: each for n, each in values.items() if each is not None or n not in _OF_LOGPROBS}


def _admitted(text: bytes) -> tuple[Admission, ...]:
    """The admissions in `text`, each field of its own type."""
    try:
        return tuple(_from_json(each) for each in loads(text)) if text else ()
    except (ValueError, TypeError, LookupError, AttributeError, LlmpqError) as error:
        refuse(f"admits requests that are none ({type(error).__name__})")


def _from_json(values: dict[str, Any]) -> Admission:
    sampling = values.pop("sampling")
    sampling |= {name: tuple(sampling[name]) for name in ("stop", "stop_token_ids")}
    values |= {name: tuple(values[name]) for name in _ADMITTED_TOKENS}
    room = TokenRange(**values.pop("room"))
    admission = Admission(sampling=Sampling(**sampling), room=room, **values)
    numbers = sum((values[name] for name in _ADMITTED_TOKENS), ())
    numbers += (admission.slot, admission.max_new_tokens, room.begin, room.size)
    if (
        {*map(type, (admission.custom_id, admission.draw_id, admission.adapter))} != {str}
        or {*map(type, numbers)} != {int}
        or min(numbers) < 0
    ):
        raise ValueError("a field of another type")
    for name in _OF_LOGPROBS:
        check_top_logprobs(getattr(admission, name), name)
    return admission
