"""Keys and values of a stage's layers, one fixed slot per request, allocated once and written in
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.messages import MicroBatch


class KVCache:
    """Slots for `slots` requests of up to `max_tokens` tokens in each of the stage's `layers`.

    Storage per layer: keys and values `[slots, kv_heads, max_tokens, head_dim]`. It is zeroed, not
    just reserved: a masked position that holds NaN would still poison the attention's weighted sum.
    """

    def __init__(
        self,
        layers: range,
        slots: int,
        max_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_tokens = max_tokens
        shape = (slots, kv_heads, max_tokens, head_dim)
        self._keys = {i: torch.zeros(shape, dtype=dtype, device=device) for i in layers}
        self._values = {i: torch.zeros(shape, dtype=dtype, device=device) for i in layers}

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(t.nbytes for t in (*self._keys.values(), *self._values.values()))

    def clear(self, slots: Sequence[int]) -> None:
        """Forget what requests left in `slots`; they may have left values that are not finite."""
        rows = list(slots)
        for stored in (*self._keys.values(), *self._values.values()):
            stored[rows] = 0

    def append(
        self, layer: int, where: SlotRows, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write the batch's new keys and values; return the layer's whole keys and values.

        `key`, `value`: `[sum(counts), kv_heads, head_dim]`.
        """
        keys, values = self._keys[layer], self._values[layer]
        if where.block is not None:  # a tenth of the time of single addresses
            slots, positions = where.block
            shape = (slots.stop - slots.start, positions.stop - positions.start, *key.shape[1:])
            keys[slots, :, positions] = key.view(shape).transpose(1, 2)
            values[slots, :, positions] = value.view(shape).transpose(1, 2)
            return keys, values
        keys[where.slot_of_token, :, where.position_of_token] = key
        values[where.slot_of_token, :, where.position_of_token] = value
        return keys, values


@dataclass(frozen=True)
class SlotRows:
    """A micro-batch's addresses in the cache as tensors on the stage's device, made once per pass.

    `slot_of_token`, `position_of_token`: `[sum(counts)]`; `slots`, `lengths`: `[requests]`.
    Lengths have the new tokens included. `block`: slots and positions of the new tokens where slots
    lie in a row and all requests add the same positions.
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

    def gather(self, stored: Tensor) -> Tensor:
        """The batch's slots of `stored` up to the longest request: a view when the slots lie in a
        row.
        """
        rows = stored[self.contiguous] if self.contiguous else stored.index_select(0, self.slots)
        return rows[:, :, : self.max_length]
