"""Keys and values of layers with a sliding window: rooms by slot, as constant states have them, in
which the latest tokens of a request lie one after another.

Where a room is full, the latest tokens move to its beginning, so that every kernel goes on reading
one range. Masks count back from the query: they do not ask how many tokens came before.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.messages import MicroBatch, TokenIds
from quant.devices import on_device

if TYPE_CHECKING:
    from actors.attention.kv_cache import CacheForm
    from actors.attention.stored import Stored


@dataclass(frozen=True)
class Copies:
    """Copies of `counts` tokens from the token slots `sources` on to `targets` on, `[copies]`."""

    sources: TokenIds
    targets: TokenIds
    counts: TokenIds

    def make(self, source: tuple[Stored, Stored], target: tuple[Stored, Stored]) -> None:
        """Copy keys and values from one place to another one."""
        for begin, to, count in zip(
            *(each.tolist() for each in (self.sources, self.targets, self.counts)), strict=True
        ):
            for one, other in zip(source, target, strict=True):
                pairs = zip(one.of_tokens(begin, count), other.of_tokens(to, count), strict=True)
                for taken, given in pairs:
                    given.copy_(taken)


@dataclass(frozen=True)
class Scratch:
    """A range of each request of a pass that has more new tokens than rooms take, in `tokens` token
    slots that all layers use one after another.

    All new tokens of the pass are written here. Those requests have their `tails` copied before
    them, the latest earlier tokens, are read from here, and leave their `latest` in the rooms. New
    tokens of the others, `rest` (token slots here and in the rooms), go there and are read there.
    """

    tokens: int
    tails: Copies
    latest: Copies
    rest: tuple[Tensor, Tensor] | None
    _held: dict[Hashable, tuple[Stored, Stored]] = field(default_factory=dict)

    def of_layer(
        self, layer: int, held: tuple[Stored, Stored], is_shared: bool
    ) -> tuple[Stored, Stored]:
        """Keys and values of the layer that has `held` in its rooms. Where later layers read them
        too (`is_shared`), they stay until the end of the pass.
        """
        keys, values = held
        key = layer if is_shared else ("sizes", keys.numbers.shape[0], keys.numbers.shape[-1])
        if key not in self._held:
            self._held[key] = keys.like(self.tokens), values.like(self.tokens)
        own_keys, own_values = self._held[key]
        return replace(own_keys, factors=keys.factors), own_values

    def settle(self, own: tuple[Stored, Stored], rooms: tuple[Stored, Stored]) -> None:
        """Copy the tails from a layer's `rooms` here, and what it keeps there."""
        self.tails.make(rooms, own)
        self.latest.make(own, rooms)
        if self.rest is None:
            return
        sources, targets = self.rest
        for one, other in zip(own, rooms, strict=True):
            other.numbers[:, targets] = one.numbers[:, sources]
            if one.scales is not None and other.scales is not None:
                other.scales[:, targets] = one.scales[:, sources]


@dataclass(frozen=True)
class WindowPass:
    """Where a pass finds the tokens of the layers that see `window` of them.

    `read` are its rows, whose `starts` count from where their ranges begin; new tokens are written
    where `written` has them. Rows `in_scratch` `[requests]` are read there, others in rooms, of
    which none has more than `room` tokens.
    """

    window: int
    room: int
    read: MicroBatch
    written: MicroBatch
    in_scratch: npt.NDArray[np.bool_]
    scratch: Scratch | None = None


class WindowRooms:
    """Rooms of `room` token slots, one for each of `slots` requests, in which layers that see
    `window` tokens keep the latest ones; `tensors` `[layers, kv_heads, slots * room, ...]` hold
    all of them.
    """

    def __init__(
        self, window: int, room: int, slots: int, tensors: Sequence[Tensor], device: torch.device
    ) -> None:
        self.window, self.room = window, room
        self._tensors, self._device = tuple(tensors), device
        self._firsts = np.zeros(slots, dtype=np.int64)  # position of the token at a room's begin
        self._ends = np.zeros(slots, dtype=np.int64)

    def place(self, slot: int, tokens: int) -> int:
        """The token slot from which on those lie that are kept of a request's `tokens`."""
        first = tokens - self.kept(tokens)
        if not self._firsts[slot] <= first <= tokens <= self._ends[slot]:
            raise RuntimeError(
                f"tokens {first} to {tokens} are asked of the request in slot {slot}, whose window "
                f"has {int(self._firsts[slot])} to {int(self._ends[slot])}"
            )
        return slot * self.room + first - int(self._firsts[slot])

    def restored(self, slot: int, tokens: int) -> None:
        """Note that the latest ones of so many tokens lie at the beginning of the room now."""
        self._firsts[slot] = tokens - self.kept(tokens)
        self._ends[slot] = tokens

    def kept(self, tokens: int) -> int:
        """How many of so many tokens a later one sees."""
        return min(tokens, self.window - 1)

    def enter(self, batch: MicroBatch) -> WindowPass:
        """Make room for the new tokens of `batch`, which may have been entered before.

        Raises RuntimeError where the earlier tokens of a request are not there.
        """
        slots, starts, counts = batch.slots, batch.starts, batch.counts
        if not len(slots):  # of a step that is recorded before there is one
            return WindowPass(self.window, self.room, batch, batch, np.zeros(0, dtype=np.bool_))
        goes_on = (slots[1:] == slots[:-1]) & (starts[1:] == (starts + counts)[:-1])
        edges = np.flatnonzero(np.concatenate([[True], ~goes_on]))  # as of `by_token`
        run = np.concatenate([[0], np.cumsum(~goes_on)])
        own, begun = slots[edges], starts[edges]
        news = np.add.reduceat(counts, edges)
        kept = self._follow(own, begun, news)
        is_long = kept + news > self.room
        firsts = np.where(is_long, begun - kept, self._firsts[own])
        begins = own * self.room
        if not is_long.any():
            read = MicroBatch(slots, starts - firsts[run], counts, begins[run])
            self._ends[own] = begun + news
            return WindowPass(self.window, self.room, read, read, is_long[run])
        sizes = np.where(is_long, kept + news, news)
        places = np.cumsum(sizes) - sizes
        ends = begun + news
        latest = np.minimum(ends, self.window - 1)
        there = np.flatnonzero(is_long)
        tailed = there[kept[there] > 0]
        tails = Copies(
            (begins + begun - kept - self._firsts[own])[tailed], places[tailed], kept[tailed]
        )
        stored = Copies((places + sizes - latest)[there], begins[there], latest[there])
        rest = None
        if not is_long.all():
            short = np.flatnonzero(~is_long)
            each = [
                np.concatenate([np.arange(b, b + n) for b, n in zip(by, news[short], strict=True)])
                for by in (places[short], (begins + begun - firsts)[short])
            ]
            sources, targets = on_device(self._device, *each)
            rest = sources, targets
        self._firsts[own[there]] = (ends - latest)[there]
        self._ends[own] = ends
        read = MicroBatch(
            slots, starts - firsts[run], counts, np.where(is_long, places, begins)[run]
        )
        before = np.where(is_long, begun - kept, begun)
        written = MicroBatch(slots, starts - before[run], counts, places[run])
        scratch = Scratch(int(sizes.sum()), tails, stored, rest)
        return WindowPass(self.window, self.room, read, written, is_long[run], scratch)

    def _follow(self, slots: TokenIds, starts: TokenIds, news: TokenIds) -> TokenIds:
        """How many earlier tokens each request needs, which are there; rooms that would be full
        have them at their beginning.
        """
        if int(slots.max()) >= len(self._ends):
            raise RuntimeError(
                f"a request is in slot {int(slots.max())}, of {len(self._ends)} that have windows"
            )
        fresh = slots[starts == 0]
        self._firsts[fresh] = self._ends[fresh] = 0
        kept = np.minimum(starts, self.window - 1)
        wrong = (starts > self._ends[slots]) | (starts - kept < self._firsts[slots])
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            slot = int(slots[row])
            raise RuntimeError(
                f"the request in slot {slot} goes on at token {int(starts[row])}, but its window "
                f"has {int(self._firsts[slot])} to {int(self._ends[slot])}"
            )
        is_full = starts + news - self._firsts[slots] > self.room
        for row in np.flatnonzero(is_full & (kept + news <= self.room)).tolist():
            self._to_beginning(int(slots[row]), int(starts[row]), int(kept[row]))
        return kept

    def _to_beginning(self, slot: int, end: int, tokens: int) -> None:
        """Move the `tokens` tokens before `end` of all layers to where the room begins."""
        begin, first = slot * self.room, end - tokens
        shift, step = first - int(self._firsts[slot]), self.room - self.window + 1
        for tensor in self._tensors:
            for at in range(begin, begin + tokens, step):
                count = min(step, begin + tokens - at)
                part = tensor[:, :, at + shift : at + shift + count]
                tensor[:, :, at : at + count] = part.clone() if shift < count else part
        self._firsts[slot] = first


def make_rooms(
    keys: dict[int, Stored], values: dict[int, Stored], form: CacheForm
) -> dict[int, WindowRooms]:
    """Give those of the layers that have rooms by `form` their keys and values there; the rooms by
    layer. Layers of one size are parts of one tensor, so that tokens of all move at once.
    """
    found: dict[int, WindowRooms] = {}
    roomed = [layer for layer in keys if layer in form.rooms]
    for window in {form.windows[layer]: None for layer in roomed}:
        own, tensors = [n for n in roomed if form.windows[n] == window], list[Tensor]()
        sizes = {n: keys[n].numbers.shape[::2] for n in own}
        for size in dict.fromkeys(sizes.values()):
            alike = [n for n in own if sizes[n] == size]
            for held in (keys, values):
                whole = held[alike[0]].in_one(len(alike), form.slots * form.rooms[own[0]])
                tensors += (
                    [whole.numbers] if whole.scales is None else [whole.numbers, whole.scales]
                )
                held.update({n: held[n].as_part(whole, place) for place, n in enumerate(alike)})
        rooms = WindowRooms(window, form.rooms[own[0]], form.slots, tensors, form.device)
        found |= dict.fromkeys(own, rooms)
    return found
