"""The ranges of requests in the KV cache, as a stage has been told of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from actors.messages import MicroBatch, Park, TokenIds, TokenRange


class Rooms:
    """The ranges of requests in a cache of `tokens` token slots, as a stage has been told of them.

    A stage is not told when a request ends. So where a range is given to another request, the one
    that had it before is taken for ended; if that is computed once more, the cache of one of them
    is spoilt, which is an error. Checking a micro-batch takes some microseconds for each request
    that comes, moves or grows, and about ten for all others together.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._begins = np.zeros(0, dtype=np.int64)  # by slot
        self._sizes = np.zeros(0, dtype=np.int64)  # 0: none, or not known

    def follow(self, batch: MicroBatch) -> None:
        """Take in what `batch` says of ranges, before anything of it is done.

        Raises RuntimeError where tokens would be written, moved or parked that do not lie in the
        range of their request, or a range is not in the cache or has another one in it.
        """
        self._make_room(int(batch.slots.max()) + 1)
        for park in batch.parks:
            self.slot_of(park)
        for move in batch.moves:
            slot = self._slot_at(move.begin, move.tokens)
            self._give(slot, TokenRange(move.to, int(self._sizes[slot])))
        for admission in batch.admitted:
            if admission.room.size:
                self._make_room(admission.slot + 1)
                self._give(admission.slot, admission.room)
        for each in (*batch.restores, *batch.keeps):
            self.slot_of(each)
        if batch.sizes is None:  # of tests and measurements
            return
        grown = np.flatnonzero(batch.sizes > self._sizes[batch.slots])
        for row in grown.tolist():
            slot = int(batch.slots[row])
            if self._sizes[slot]:
                self._give(slot, TokenRange(int(self._begins[slot]), int(batch.sizes[row])))
        self._check_rows(batch, batch.sizes)

    def _check_rows(self, batch: MicroBatch, sizes: TokenIds) -> None:
        slots = batch.slots
        right = (self._begins[slots] == batch.begins) & (self._sizes[slots] == sizes)
        right &= batch.lengths <= sizes
        if right.all():
            return
        row = int(np.flatnonzero(~right)[0])
        slot = int(slots[row])
        _fail(
            f"the request in slot {slot} would have {int(batch.lengths[row])} tokens from token "
            f"slot {int(batch.begins[row])} on, in a range of {int(sizes[row])}; it was given "
            f"{int(self._sizes[slot])} from {int(self._begins[slot])} on (0: what it had was given "
            "to another)"
        )

    def _make_room(self, slots: int) -> None:
        missing = slots - len(self._sizes)
        if missing > 0:
            self._begins = np.pad(self._begins, (0, missing))
            self._sizes = np.pad(self._sizes, (0, missing))

    def slot_of(self, park: Park) -> int:
        """The slot of the request whose tokens are parked, or come back."""
        return self._slot_at(park.begin, park.tokens)

    def _slot_at(self, begin: int, tokens: int) -> int:
        """The slot whose range begins there and has so many tokens."""
        found = np.flatnonzero((self._begins == begin) & (self._sizes >= tokens))
        if not len(found):
            _fail(f"no request has {tokens} tokens from token slot {begin} on")
        return int(found[0])

    def _give(self, slot: int, room: TokenRange) -> None:
        if not 0 <= room.begin <= room.end <= self._tokens:
            _fail(
                f"the request in slot {slot} would have {room.size} token slots from {room.begin} "
                f"on, of {self._tokens}"
            )
        taken = (self._begins < room.end) & (self._begins + self._sizes > room.begin)
        self._sizes[taken] = 0
        self._begins[slot], self._sizes[slot] = room.begin, room.size


def _fail(what: str) -> NoReturn:
    raise RuntimeError(f"{what}; the scheduler's ranges of the KV cache are wrong")


def joined(rooms: Sequence[TokenRange]) -> list[TokenRange]:
    """The same token slots in as few ranges as possible, each of them a kernel on a GPU."""
    found: list[TokenRange] = []
    for room in sorted(rooms, key=lambda room: room.begin):
        if found and found[-1].end == room.begin:
            found[-1] = TokenRange(found[-1].begin, found[-1].size + room.size)
        else:
            found.append(room)
    return found
