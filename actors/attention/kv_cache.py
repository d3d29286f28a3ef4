"""Keys and values of a stage's layers in token slots, of which each request holds a range; they are
allocated once and written in place.

Ranges rather than blocks with a table (ORCA section 4.2 reserves them too): every attention kernel
from GPUs of compute capability 6.0 on, PyTorch's and the loop of a CPU read a range where it lies.
Where the holes between ranges are too small for a request, ranges are moved together.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from actors.attention.addresses import Addresses
from actors.attention.delta.states import ConstantStates
from actors.attention.parked import ParkedTokens
from actors.attention.rooms import Rooms, joined
from actors.attention.stored import Stored
from actors.attention.windows import WindowPass, make_rooms
from actors.messages import MicroBatch, Move, Park, TokenIds, TokenRange
from planner.model.tensor_parallel import RankShare
from quant.backends.table import reads_ranges
from quant.devices import local_processor, on_device
from quant.scheme import FULL_BITS


@dataclass(frozen=True)
class CacheShape:
    """Room for so many `tokens` of all requests together, in every layer. `others`: heads and width
    in layers that differ; None: a layer has no keys and values of its own. `owners`: for each layer
    that reads those of another one, which. `rotated`: where one vector of a token is both key and
    value, how many numbers positions rotate at its end (0: keys and values are apart).
    """

    tokens: int
    kv_heads: int
    head_dim: int
    others: Mapping[int, tuple[int, int] | None] = field(default_factory=dict)
    owners: Mapping[int, int] = field(default_factory=dict)
    rotated: int = 0

    def elements(self, layers: range) -> int:
        """Numbers of a token in these layers."""
        each = sum(heads * width for heads, width in self.heads(layers).values())
        return each if self.rotated else 2 * each

    def heads(self, layers: range) -> dict[int, tuple[int, int]]:
        """Heads and width of those of the `layers` that have keys and values."""
        usual = self.kv_heads, self.head_dim
        found = {layer: self.others.get(layer, usual) for layer in layers}
        return {layer: heads for layer, heads in found.items() if heads is not None}


@dataclass(frozen=True)
class CacheForm:
    """The form of keys and values: `kv_bits` 16 in `dtype`, 8 as codes. Requests may be in `slots`
    slots, for layers that hold a state or a window of each. `alone`: layers that read the keys of
    earlier ones are given these, and hold them. `shares`: what a rank holds of each layer; None:
    all. `windows`: how many latest tokens a layer sees that does not see all; `rooms`: token slots
    of a request's room in those of them that have rooms.
    """

    dtype: torch.dtype
    device: torch.device
    kv_bits: int = FULL_BITS
    slots: int = 0
    alone: bool = False
    shares: tuple[RankShare, ...] | None = None
    windows: Mapping[int, int] = field(default_factory=dict)
    rooms: Mapping[int, int] = field(default_factory=dict)

    @property
    def held_dtype(self) -> torch.dtype:
        return self.dtype if self.kv_bits == FULL_BITS else torch.int8


def counts_on_ranges(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether plans count on `actors.attention.cuda.range_attention` there."""
    name = str(dtype).removeprefix("torch.")
    return device.type == "cuda" and reads_ranges(local_processor(device), name, head_dim)


def joined_moves(moves: Sequence[Move]) -> tuple[TokenIds, TokenIds]:
    """The token slots from which and to which tokens go by all `moves`, made in their order."""
    first = min(min(move.begin, move.to) for move in moves)
    end = max(max(move.begin, move.to) + move.tokens for move in moves)
    before = np.arange(first, end)
    held = before.copy()
    for move in moves:
        begin, to = move.begin - first, move.to - first
        held[to : to + move.tokens] = held[begin : begin + move.tokens].copy()
    moved = held != before
    return held[moved], before[moved]


class KVCache:
    """Keys and values of the stage's `layers` in token slots; some layers may have none.

    Attention reads all of them from here, also within a prompt: what a token sees of another does
    not depend on whether the two came in one pass, so that a request replayed from its tokens goes
    on as it would have, but for the rounding of sums.

    Up to `parked_tokens` tokens of requests that were preempted, or prefilled for other stages, lie
    in host memory. `factors` `[kv_heads, head_dim]` by layer: what keys are divided by before they
    become codes; plain numbers have none. Layers with constant `states` have no keys. Those with
    rooms hold the latest tokens of each slot (`actors.attention.windows`).
    """

    def __init__(
        self,
        layers: range,
        shape: CacheShape,
        form: CacheForm,
        parked_tokens: int = 0,
        factors: Mapping[int, Tensor] = MappingProxyType({}),
        states: ConstantStates | None = None,
    ) -> None:
        found = shape.heads(layers)
        heads = {n: each for n, each in found.items() if states is None or n not in states}
        self.layers = layers
        self.held_dtype, self.device = form.held_dtype, form.device
        kept = {} if form.kv_bits == FULL_BITS else factors
        own = {layer: each.to(form.device, form.dtype) for layer, each in kept.items()}

        def empty(layer: int, factors: Tensor | None = None) -> Stored:
            kv_heads, head_dim = heads[layer]
            sizes = (kv_heads, 0 if layer in form.rooms else shape.tokens, head_dim)
            return Stored.empty(sizes, self.held_dtype, form.device, factors, shape.rotated)

        self.states, self._owners = states, shape.owners
        self._keys = {layer: empty(layer, own.get(layer)) for layer in heads}
        self._values = {} if shape.rotated else {layer: empty(layer) for layer in heads}
        self._seen = {layer: form.windows[layer] for layer in heads if layer in form.windows}
        self._windows = make_rooms(self._keys, self._values, form)
        self._own_ends = np.zeros(shape.tokens, dtype=np.int64)
        self._rooms = Rooms(shape.tokens)
        self.parked = ParkedTokens(parked_tokens, form.device)
        self._reads_ranges = all(
            counts_on_ranges(width, form.dtype, form.device) for width in self.head_widths
        )

    def like(self, layers: range, tokens: int) -> KVCache:
        """An empty cache of some of the layers, in the same form; all tokens are in ranges."""
        made = copy.copy(self)
        made.layers, made._own_ends = layers, np.zeros(tokens, dtype=np.int64)
        made._seen, made._windows = {}, {}
        for held in ("_keys", "_values"):
            own: dict[int, Stored] = getattr(self, held)
            setattr(made, held, {n: own[n].like(tokens) for n in layers if n in own})
        return made

    @property
    def holding_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values of their own."""
        return tuple(self._keys)

    @property
    def head_widths(self) -> frozenset[int]:
        return frozenset(keys.numbers.shape[-1] for keys in self._keys.values())

    @property
    def nbytes(self) -> int:
        states = 0 if self.states is None else self.states.nbytes
        return sum(each.nbytes for each in self._all()) + states

    def prepare(self, batch: MicroBatch) -> None:
        """Do what `batch` asks for before it is computed: park, move, clear and restore.

        Raises RuntimeError where its tokens do not lie in the ranges of its requests.
        """
        parked = [self._held(park) for park in batch.parks if self.layers]
        self._rooms.follow(batch)
        self.parked.forget(batch.drops)
        for park, parts in zip(batch.parks, parked, strict=False):
            self.parked.park(park, parts)
        self.move(batch.moves)
        self.clear([admission.room for admission in batch.admitted])
        for back in batch.restores if self.layers else ():
            slot = self._rooms.slot_of(back)
            for holder in {*self._windows.values(), *([self.states] if self.states else ())}:
                holder.restored(slot, back.tokens)
            self.parked.restore(back, self._held(back))
        if self.states is not None:
            self.states.follow(batch)

    def keep(self, batch: MicroBatch) -> None:
        """Copy what `batch`, which is computed, asks for to host memory, where that has room."""
        for each in batch.keeps if self.layers else ():
            self.parked.keep(each, self._held(each))

    def _held(self, park: Park) -> list[Tensor]:
        """Views of all that is held of a request: see `of_tokens`."""
        return self.of_tokens(park.begin, park.tokens, self._rooms.slot_of(park))

    def of_tokens(self, begin: int, tokens: int, slot: int = 0) -> list[Tensor]:
        """Views of what is held of a request in `slot`, whose `tokens` begin at token slot `begin`:
        of the keys of all layers, then of their values, `[kv_heads, tokens, ...]`; codes come
        before their scales. Of layers with windows those that later tokens see. At last what
        `ConstantStates.of_slot` has.
        """
        parts: list[Tensor] = []
        for layer, stored in (*self._keys.items(), *self._values.items()):
            count, rooms = self._kept(layer, tokens), self._windows.get(layer)
            first = begin + tokens - count if rooms is None else rooms.place(slot, tokens)
            parts += stored.of_tokens(first, count)
        return parts if self.states is None else parts + self.states.of_slot(slot)

    def forms(self, tokens: int) -> list[Tensor]:
        """Views of the sizes and types of `of_tokens`."""
        held = (*self._keys.items(), *self._values.items())
        parts = (each.of_tokens(0, self._kept(layer, tokens)) for layer, each in held)
        states = [] if self.states is None else self.states.of_slot(0)
        return [part for each in parts for part in each] + states

    def _kept(self, layer: int, tokens: int) -> int:
        """How many of so many tokens later ones see."""
        return min(tokens, self._seen.get(layer, tokens + 1) - 1)

    def clear(self, rooms: Sequence[TokenRange]) -> None:
        """Forget what was in `rooms`, as it may not have been finite; each is a request's own from
        now on.
        """
        for each in joined(rooms):
            for stored in self._in_ranges():
                stored.clear(each)
        for room in rooms:
            if room.size:
                self._own_ends[room.begin] = room.end

    def move(self, moves: Sequence[Move]) -> None:
        """Make `moves` in their order; each may overlap itself. A GPU makes several by one copy of
        each tensor, as starting a copy takes longer there than the few tokens of most.

        What follows a request's tokens in its new place is not cleared: only they are its own.
        """
        if len(moves) > 1 and self.device.type != "cpu":
            taken, put = on_device(self.device, *joined_moves(moves))
            for stored in self._in_ranges():
                stored.rearrange(taken, put)
        else:
            for move in moves:
                for stored in self._in_ranges():
                    stored.move(move)
        for move in moves:
            self._own_ends[move.to] = move.to + move.tokens

    def addresses(self, batch: MicroBatch) -> Addresses:
        return Addresses.of(batch, self.device, self._own_ends, self._reads_ranges)

    def owner(self, layer: int) -> int:
        """The layer whose keys and values it reads, which may be its own."""
        return self._owners.get(layer, layer)

    def enter(self, batch: MicroBatch) -> dict[int, WindowPass]:
        """Make room in windows for the new tokens of `batch`; where they lie, by `window_of`."""
        return {rooms.window: rooms.enter(batch) for rooms in set(self._windows.values())}

    def window_addresses(self, batch: MicroBatch) -> Addresses:
        """Addresses of `batch` where nothing is known of what lies behind its tokens."""
        return Addresses.of(batch, self.device, None, self._reads_ranges)

    def is_shared(self, layer: int) -> bool:
        """Whether later layers read its keys and values."""
        return layer in self._owners.values()

    def window_of(self, layer: int) -> int | None:
        """The window of a layer, or of the one that it reads, that has rooms; None: of others."""
        rooms = self._windows.get(self.owner(layer))
        return None if rooms is None else rooms.window

    def of_layer(self, layer: int) -> tuple[Stored, Stored]:
        """The layer's whole keys and values, or those of the earlier layer that it reads; twice the
        same where keys are values.
        """
        owner = self.owner(layer)
        keys = self._keys[owner]
        return keys, self._values.get(owner, keys)

    def states_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's constant states: see `ConstantStates.of_layer`."""
        assert self.states is not None, "only layers that have one ask for a state"
        return self.states.of_layer(layer)

    def append(
        self,
        layer: int,
        where: Addresses,
        key: Tensor,
        value: Tensor,
        held: tuple[Stored, Stored] | None = None,
    ) -> tuple[Stored, Stored]:
        """Write the batch's new keys and values, where they are the layer's own, to `held` or to
        the whole keys and values that it reads; returns these.

        `key`, `value`: `[sum(counts), kv_heads, head_dim]`.
        """
        keys, values = held or self.of_layer(layer)
        if layer not in self._owners:
            keys.write(where, key)
            if values is not keys:
                values.write(where, value)
        return keys, values

    def _all(self) -> Iterator[Stored]:
        yield from self._keys.values()
        yield from self._values.values()

    def _in_ranges(self) -> Iterator[Stored]:
        """What lies in the ranges of requests, rather than in rooms."""
        for held in (self._keys, self._values):
            yield from (stored for layer, stored in held.items() if layer not in self._windows)
