"""Keys and values of a stage's layers, one fixed slot per request, allocated once and written in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.messages import MicroBatch
from quant.scheme import FULL_BITS

SCALE_DTYPE = torch.bfloat16
"""Type of the scales of int8 codes: the range of float32. Codes are made with the stored scale."""

_LARGEST_CODE = 127  # also where the scale was rounded down by 2^-9: 127.25 is rounded to it
_NO_SCALE = np.zeros((), np.uint16)
_LEAST_SCALE = 2.0**-100  # its inverse is finite; smaller numbers are nothing beside any other


class HeldArrays(NamedTuple):
    """Keys or values of one layer as numpy arrays, 16-bit types as their bits.

    Where there are no scales, theirs is a view of a single zero, which is never read.
    """

    numbers: npt.NDArray[Any]
    scales: npt.NDArray[Any]


@dataclass(frozen=True)
class Stored:
    """Keys or values of one layer: `numbers` `[slots, kv_heads, max_tokens, head_dim]`.

    At 8 bits they are int8 codes, to be multiplied by `scales` `[slots, kv_heads, max_tokens]`.
    """

    numbers: Tensor
    scales: Tensor | None = None

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Stored:
        """Zeros, with scales if `dtype` is int8. Memory is not just reserved: a masked position
        that holds NaN would still poison the attention's weighted sum.
        """
        coded = dtype == torch.int8
        scales = torch.zeros(shape[:-1], dtype=SCALE_DTYPE, device=device) if coded else None
        return cls(torch.zeros(shape, dtype=dtype, device=device), scales)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.numbers.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @cached_property
    def arrays(self) -> HeldArrays:
        """The memory of the cache for compiled code on a CPU."""
        numbers = _as_array(self.numbers)
        if self.scales is None:
            return HeldArrays(numbers, np.broadcast_to(_NO_SCALE, numbers.shape[:-1]))
        return HeldArrays(numbers, _as_array(self.scales))

    def clear(self, slots: Sequence[int]) -> None:
        """Set `slots` to zero; codes are finite, so that a scale of zero is enough."""
        (self.numbers if self.scales is None else self.scales)[list(slots)] = 0

    def write(self, where: SlotRows, new: Tensor) -> None:
        """Store `new` `[sum(counts), kv_heads, head_dim]`, as codes where there are scales."""
        if self.scales is None:
            where.write(self.numbers, new)
            return
        codes, scales = quantized(new)
        where.write(self.numbers, codes)
        where.write(self.scales, scales)

    def read(self, pick: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        """The part that `pick` takes of a tensor `[slots, kv_heads, max_tokens, ...]`.

        Codes are restored in `dtype`; plain numbers are a view if `pick` returns one.
        """
        numbers = pick(self.numbers)
        if self.scales is None:
            return numbers
        return numbers * pick(self.scales).to(dtype)[..., None]


def _as_array(stored: Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = (
        stored.view(torch.uint16) if stored.element_size() == 2 else stored
    ).numpy()
    return array


def quantized(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """`numbers` `[..., head_dim]` as int8 codes and one scale `[...]` for each row of them.

    No number is off by more than half its row's scale. The scale of a row with a number that is not
    finite is not finite either, so that the whole row is restored as not finite.
    """
    wide = numbers.float()
    largest = wide.abs().amax(-1)
    scales = (largest / _LARGEST_CODE).clamp(min=_LEAST_SCALE).to(SCALE_DTYPE)
    return (wide / scales.float()[..., None]).round_().to(torch.int8), scales


@dataclass(frozen=True)
class CacheShape:
    """Room for `slots` requests of up to `max_tokens` tokens each, in every layer."""

    slots: int
    max_tokens: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class CacheForm:
    """The form of keys and values in the cache: `kv_bits` 16 in `dtype`, 8 as codes."""

    dtype: torch.dtype
    device: torch.device
    kv_bits: int = FULL_BITS

    @property
    def held_dtype(self) -> torch.dtype:
        """Type of the numbers in the cache."""
        return self.dtype if self.kv_bits == FULL_BITS else torch.int8


class KVCache:
    """Keys and values of the stage's `layers`, one slot a request.

    Attention reads all of them from here, also within a prompt: what a token sees of another does
    not depend on whether the two came in one pass, so that a request replayed from its tokens goes
    on as it would have.
    """

    def __init__(self, layers: range, shape: CacheShape, form: CacheForm) -> None:
        sizes = (shape.slots, shape.kv_heads, shape.max_tokens, shape.head_dim)
        self.held_dtype = form.held_dtype
        self._keys = {i: Stored.empty(sizes, self.held_dtype, form.device) for i in layers}
        self._values = {i: Stored.empty(sizes, self.held_dtype, form.device) for i in layers}

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(each.nbytes for each in (*self._keys.values(), *self._values.values()))

    def clear(self, slots: Sequence[int]) -> None:
        """Forget earlier requests in `slots`, whose values may not have been finite."""
        for stored in (*self._keys.values(), *self._values.values()):
            stored.clear(slots)

    def append(
        self, layer: int, where: SlotRows, key: Tensor, value: Tensor
    ) -> tuple[Stored, Stored]:
        """Write the batch's new keys and values; return the layer's whole keys and values.

        `key`, `value`: `[sum(counts), kv_heads, head_dim]`.
        """
        keys, values = self._keys[layer], self._values[layer]
        keys.write(where, key)
        values.write(where, value)
        return keys, values


@dataclass(frozen=True)
class SlotRows:
    """A micro-batch's addresses in the cache as tensors on the stage's device, made once per pass.

    `slot_of_token`, `position_of_token`: `[sum(counts)]`; `slots`, `lengths`: `[requests]`, where
    lengths include the new tokens. `contiguous`: the slots where they lie in a row. `block`: slots
    and positions of the new tokens where, besides, all requests add the same positions.
    """

    slot_of_token: Tensor
    position_of_token: Tensor
    slots: Tensor
    lengths: Tensor
    max_length: int
    equal_lengths: bool
    contiguous: slice | None
    block: tuple[slice, slice] | None

    @classmethod
    def of(cls, batch: MicroBatch, device: torch.device) -> SlotRows:
        """Addresses of `batch` on `device`."""
        lengths = batch.starts + batch.counts
        first, count = int(batch.slots[0]), len(batch.slots)
        in_a_row = bool((batch.slots == range(first, first + count)).all())
        contiguous = slice(first, first + count) if in_a_row else None
        equal_lengths = bool((lengths == lengths[0]).all())
        alike = equal_lengths and bool((batch.starts == batch.starts[0]).all())
        slots = torch.as_tensor(batch.slots, device=device)
        return cls(
            slot_of_token=slots.repeat_interleave(torch.as_tensor(batch.counts, device=device)),
            position_of_token=torch.as_tensor(batch.positions, device=device),
            slots=slots,
            lengths=torch.as_tensor(lengths, device=device),
            max_length=int(lengths.max()),
            equal_lengths=equal_lengths,
            contiguous=contiguous,
            block=(contiguous, slice(int(batch.starts[0]), int(lengths[0])))
            if contiguous and alike
            else None,
        )

    def write(self, stored: Tensor, new: Tensor) -> None:
        """Put `new` `[sum(counts), kv_heads, ...]` where the new tokens belong in `stored` `[slots,
        kv_heads, max_tokens, ...]`.
        """
        if self.block is None:
            stored[self.slot_of_token, :, self.position_of_token] = new
            return
        slots, positions = self.block  # a tenth of the time of single addresses
        shape = (slots.stop - slots.start, positions.stop - positions.start, *new.shape[1:])
        stored[slots, :, positions] = new.view(shape).transpose(1, 2)

    def gather(self, stored: Tensor) -> Tensor:
        """The batch's slots of `stored` up to the longest request: a view when the slots lie in a
        row.
        """
        rows = stored[self.contiguous] if self.contiguous else stored.index_select(0, self.slots)
        return rows[:, :, : self.max_length]
