"""Keys and values of prompts on their way from the stages that prefilled them to those that decode.

Both have copies in host memory, of all heads and layers that they hold themselves. What one gives
to another is the part that both hold: some heads of some layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from actors.attention.kv_cache import KVCache
from actors.attention.parked import ParkedCopies
from actors.messages import KvPart
from actors.transport.kv_format import Held, decode_kv, encode_kv


class HeldKeysValues:
    """The copies in host memory beside `cache`, which holds `heads` of the model's key/value heads.

    For any thread.
    """

    def __init__(self, cache: KVCache, heads: range) -> None:
        self._cache = cache
        self._own = KvPart(cache.layers, heads)

    def hand_over(self, keys: Sequence[int], part: KvPart, as_part: KvPart | None = None) -> Tensor:
        """A message `[bytes]` with the `part` of what lies under `keys`, as far as something does;
        it tells of `as_part`, where that is given.
        """
        pieces = {key: self._piece(key, part) for key in keys}
        found = {key: piece for key, piece in pieces.items() if piece is not None}
        return encode_kv(as_part or part, found)

    def take_over(self, messages: Sequence[Tensor]) -> tuple[int, ...]:
        """Keep what several stages handed over; returns the keys of the requests whose keys and
        values are complete and found room.

        Raises `StageLostError` for messages that no stage sends, ValueError for those of another
        model or form.
        """
        received = [decode_kv(message) for message in messages]
        every = dict.fromkeys(key for _, found in received for key in found)
        pieces = {
            key: [(part, found[key]) for part, found in received if key in found] for key in every
        }
        return tuple(key for key, own in pieces.items() if self._put(key, own))

    def forget(self, keys: Sequence[int]) -> None:
        self._cache.parked.forget(keys)

    def _piece(self, key: int, part: KvPart) -> ParkedCopies | None:
        """The `part` of what lies under `key`; None where nothing does."""
        held = self._cache.parked.found(key)
        if held is None:
            return None
        return ParkedCopies(held.tokens, tuple(self._parts(held.copies, part)))

    def _put(self, key: int, pieces: Sequence[tuple[KvPart, Held]]) -> bool:
        """Keep what `pieces` make up, numbers in the cache's own type; False where there is no room
        or something is missing.
        """
        if sum(part.size for part, _ in pieces) != self._own.size:
            return False
        tokens, parked = pieces[0][1][0], self._cache.parked
        forms = self._cache.forms(tokens)
        copies = [parked.empty(form.shape, form.dtype) for form in forms]
        for part, (_, tensors) in pieces:
            for into, tensor in zip(self._parts(copies, part), tensors, strict=True):
                _fill(into, tensor)
        return parked.put(key, ParkedCopies(tokens, tuple(copies)))

    def _parts(self, copies: Sequence[Tensor], part: KvPart) -> Iterator[Tensor]:
        """Views of the `part` of copies as a cache has them: for each layer of it that has keys the
        tensors of these, then those of the values, `[heads, tokens, ...]`; then states `[layers,
        ...]` of the layers that have one.
        """
        states = self._cache.states
        keys_values = copies if states is None else copies[: -len(states.of_slot(0))]
        heads = self._heads(part)
        for place in self._places(part.layers, len(keys_values)):
            yield copies[place][heads]
        own = slice(0, 0) if states is None else states.places(part.layers)
        if own.start != own.stop:
            yield from (state[own] for state in copies[len(keys_values) :])

    def _heads(self, part: KvPart) -> slice:
        first = self._own.heads.start
        return slice(part.heads.start - first, part.heads.stop - first)

    def _places(self, layers: range, tensors: int) -> list[int]:
        """Where the tensors of `layers` stand among all of a cache: see `KVCache.of_tokens`."""
        holding = self._cache.holding_layers
        each = 2 if self._cache.held_dtype == torch.int8 else 1  # codes come with scales
        keys = [each * place for place, layer in enumerate(holding) if layer in layers]
        values = range(0, tensors, each * len(holding) or 1)  # none where keys are values
        firsts = [begin + key for begin in values for key in keys]
        return [place for first in firsts for place in range(first, first + each)]


def _fill(into: Tensor, tensor: Tensor) -> None:
    """Put `tensor` there, in the type of that; ValueError for codes in the place of plain numbers,
    and for other sizes.
    """
    is_plain = into.is_floating_point()
    if into.shape != tensor.shape or is_plain != tensor.is_floating_point():
        raise ValueError(
            f"keys and values come as {list(tensor.shape)} of {tensor.dtype}, where "
            f"{list(into.shape)} of {into.dtype} are held; both plans must have the same kv_bits"
        )
    into.copy_(tensor)
