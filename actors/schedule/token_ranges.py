"""Contiguous ranges of the token slots of a KV cache, and the moves that make room for them.

Ranges of requests whose micro-batch is still under way may move too. Every stage takes
micro-batches in the order of their submission, and makes the moves of one before it computes it. So
when a stage makes the moves that come with micro-batch k, it has computed exactly those before k:
their tokens are in the cache, at the places that these micro-batches and the moves up to k-1 say,
and no pass on that stage still reads or writes the old places. Micro-batches from k on say the new
places. What has to move are therefore the tokens of all micro-batches that were submitted before k,
whether they came back or not. For the same reason a range that is free may be given to another
request at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from actors.messages import Move, TokenRange

Numbers = npt.NDArray[np.int64]


class _Window(NamedTuple):
    """Neighbouring gaps from `first` to `last`; the ranges between them hold `tokens` tokens."""

    tokens: int
    first: int
    last: int


@dataclass
class _Layout:
    """The ranges in their order: of every holder, its begin and size `[ranges]`.

    Gap i is the free slots before range i, and the last gap those after all; `gaps`
    `[ranges + 1]` are their sizes, many of them 0.
    """

    holders: Numbers
    begins: Numbers
    ends: Numbers
    gaps: Numbers


class TokenRanges:
    """The ranges of at most `holders` holders, numbered from 0, in `n_slots` token slots.

    A range is put into the smallest hole that has room (best fit). Where there are enough free
    slots but no such hole, the neighbouring ranges with the fewest tokens are pushed together: so
    a reservation succeeds whenever enough slots are free, wherever they are.

    With first come, first served in 131,072 slots and lengths of two public traces (Splitwise code
    and conversation) no hole fits at 29 and 41% of reservations; first fit is no better (30 and
    41%). Then 5 and 12 tokens move for each token of a request, as hardly a slot is free: with 2%
    of the slots kept back 2 and 2, with 5% less than 1.
    """

    def __init__(self, n_slots: int, holders: int) -> None:
        self.n_slots = n_slots
        self.reserved = 0
        self.begins = np.zeros(holders, dtype=np.int64)
        self.sizes = np.zeros(holders, dtype=np.int64)
        self._order = np.zeros(0, dtype=np.int64)  # holders of ranges, by begin

    @property
    def free(self) -> int:
        return self.n_slots - self.reserved

    def range_of(self, holder: int) -> TokenRange:
        """The range of `holder`, of size 0 where it has none."""
        return TokenRange(int(self.begins[holder]), int(self.sizes[holder]))

    def reserve(self, holder: int, size: int, written: Numbers) -> tuple[Move, ...]:
        """Give `holder` a range of `size` slots; returns the moves that make room for it.

        `written` `[holders]`: the tokens that each holder's range has by then, which are all that
        moves. Raises ValueError unless `holder` is without a range and `size` slots are free.
        """
        if self.sizes[holder] or not 1 <= size <= self.free:
            raise ValueError(
                f"{size} token slots for holder {holder}, which has {self.sizes[holder]}; "
                f"{self.free} of {self.n_slots} are free"
            )
        layout = self._layout()
        gap = _best_fit(layout.gaps, size)
        moves: tuple[Move, ...] = ()
        if gap is None:
            window = _cheapest_window(layout, size, written)
            moves = self._push_apart(layout, window, window.last, written)
            gap = window.last
        begin = self.range_of(int(self._order[gap - 1])).end if gap else 0
        self._put(holder, begin, size)
        return moves

    def grow(self, holder: int, size: int, written: Numbers) -> tuple[Move, ...]:
        """Enlarge the range of `holder` to `size` slots; returns the moves that this takes.

        In place where the hole behind it has room; else it moves to another hole, or its neighbours
        are pushed away, whichever moves fewer tokens. Raises ValueError unless it grows and the
        slots that it grows by are free.
        """
        own = self.range_of(holder)
        if not own.size < size <= own.size + self.free:
            raise ValueError(
                f"{size} token slots for holder {holder}, which has {own.size}; {self.free} more "
                f"of {self.n_slots} are free"
            )
        layout = self._layout()
        place = int(np.flatnonzero(layout.holders == holder)[0])
        window = _cheapest_window(layout, size - own.size, written, place)
        hole = _best_fit(layout.gaps, size)
        if hole is not None and written[holder] < window.tokens:
            self.release(holder)
            self._put(holder, int(layout.ends[hole - 1]) if hole else 0, size)
            return _moved(own.begin, int(self.begins[holder]), int(written[holder]))
        moves = self._push_apart(layout, window, place + 1, written)
        self.reserved += size - own.size
        self.sizes[holder] = size
        return moves

    def release(self, holder: int) -> None:
        self.reserved -= int(self.sizes[holder])
        self.sizes[holder] = 0
        self._order = self._order[self._order != holder]

    def _put(self, holder: int, begin: int, size: int) -> None:
        place = int(np.searchsorted(self.begins[self._order], begin))
        self._order = np.insert(self._order, place, holder)
        self.begins[holder], self.sizes[holder] = begin, size
        self.reserved += size

    def _layout(self) -> _Layout:
        begins = self.begins[self._order]
        ends = begins + self.sizes[self._order]
        gaps = np.append(begins, self.n_slots) - np.insert(ends, 0, 0)
        return _Layout(self._order, begins, ends, gaps)

    def _push_apart(
        self, layout: _Layout, window: _Window, at: int, written: Numbers
    ) -> tuple[Move, ...]:
        """Join the gaps of `window` to one before range `at`: ranges before it go to the left, and
        those from it on to the right.

        The outermost go first, so that each goes to slots that are free, or its own.
        """
        moves: list[Move] = []
        left = int(layout.ends[window.first - 1]) if window.first else 0
        for place in range(window.first, at):
            moves += self._shift(layout, place, left, written)
            left += int(layout.ends[place] - layout.begins[place])
        right = int(np.append(layout.begins, self.n_slots)[window.last])
        for place in range(window.last - 1, at - 1, -1):
            right -= int(layout.ends[place] - layout.begins[place])
            moves += self._shift(layout, place, right, written)
        return tuple(moves)

    def _shift(self, layout: _Layout, place: int, to: int, written: Numbers) -> tuple[Move, ...]:
        holder = int(layout.holders[place])
        self.begins[holder] = to
        return _moved(int(layout.begins[place]), to, int(written[holder]))


def _moved(begin: int, to: int, tokens: int) -> tuple[Move, ...]:
    """The move of a range's tokens; none where nothing is written."""
    return (Move(begin, to, tokens),) if tokens else ()


def _best_fit(gaps: Numbers, size: int) -> int | None:
    """The first of the smallest gaps with room for `size` slots."""
    fitting = np.flatnonzero(gaps >= size)
    return int(fitting[gaps[fitting].argmin()]) if len(fitting) else None


def _cheapest_window(
    layout: _Layout, size: int, written: Numbers, place: int | None = None
) -> _Window:
    """The neighbouring gaps with `size` slots together and the fewest tokens in between.

    With `place` the last gap is behind that range, which grows, and the first one is at most there:
    where it is before the range, the range itself is in between.
    """
    slots_before = np.insert(layout.gaps.cumsum(), 0, 0)
    tokens_before = np.insert(written[layout.holders].cumsum(), 0, 0)
    first = np.arange(len(layout.gaps))
    last = np.searchsorted(slots_before, slots_before[:-1] + size) - 1
    if place is not None:
        first, last = first[: place + 2], np.maximum(last[: place + 2], place + 1)
    enough = last < len(layout.gaps)
    first, last = first[enough], last[enough]
    tokens = tokens_before[last] - tokens_before[first]
    best = int(np.lexsort((last - first, tokens))[0])
    return _Window(int(tokens[best]), int(first[best]), int(last[best]))
