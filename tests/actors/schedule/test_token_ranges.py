"""The ranges of token slots, held against the content of a store and against brute force."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import Move, TokenRange
from actors.schedule.token_ranges import TokenRanges
from tests.seeds import seeds

HOLDERS = 12


class Store:
    """Token slots with a content, of which a holder writes and moves take."""

    def __init__(self, n_slots: int) -> None:
        self.slots = np.full(n_slots, -1)
        self.ranges = TokenRanges(n_slots, HOLDERS)
        self.written = np.zeros(HOLDERS, dtype=np.int64)

    def make(self, moves: tuple[Move, ...]) -> int:
        for move in moves:
            assert move.tokens > 0
            assert move.begin != move.to
            taken = self.slots[move.begin : move.begin + move.tokens].copy()
            self.slots[move.to : move.to + move.tokens] = taken
        return sum(move.tokens for move in moves)

    def write(self, holder: int) -> None:
        """Fill the whole of what is left of a range, or half of it."""
        room = self.ranges.range_of(holder)
        more = -(-(room.size - int(self.written[holder])) // 2)
        first = int(self.written[holder])
        self.written[holder] += more
        self.slots[room.begin + first : room.begin + first + more] = [
            holder * 1000 + i for i in range(first, first + more)
        ]

    def release(self, holder: int) -> None:
        self.ranges.release(holder)
        self.written[holder] = 0

    def check(self, sizes: dict[int, int]) -> None:
        """Every holder has its size and its content, and no slot is of two."""
        rooms = [self.ranges.range_of(holder) for holder in range(HOLDERS)]
        assert [room.size for room in rooms] == [sizes.get(h, 0) for h in range(HOLDERS)]
        held = sorted((room for room in rooms if room.size), key=lambda room: room.begin)
        assert all(a.end <= b.begin for a, b in pairwise(held))
        assert not held or (held[0].begin >= 0 and held[-1].end <= self.ranges.n_slots)
        assert self.ranges.free == self.ranges.n_slots - sum(sizes.values())
        for holder, room in enumerate(rooms):
            tokens = self.slots[room.begin : room.begin + self.written[holder]].tolist()
            assert tokens == [holder * 1000 + i for i in range(self.written[holder])]


@settings(max_examples=300)
@given(
    n_slots=st.integers(1, 60),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["reserve", "reserve", "release", "grow", "write"]),
            st.integers(0, HOLDERS - 1),
            st.integers(1, 30),
        ),
        max_size=60,
    ),
)
def test_whatever_has_enough_free_slots_gets_a_range(
    n_slots: int, steps: list[tuple[str, int, int]]
) -> None:
    store, sizes = Store(n_slots), dict[int, int]()
    for what, holder, size in steps:
        free = n_slots - sum(sizes.values())
        if what == "reserve" and holder not in sizes and size <= free:
            store.make(store.ranges.reserve(holder, size, store.written))
            sizes[holder] = size
        elif what == "grow" and holder in sizes and size <= free:
            store.make(store.ranges.grow(holder, sizes[holder] + size, store.written))
            sizes[holder] += size
        elif what == "write" and holder in sizes:
            store.write(holder)
        elif what == "release" and sizes.pop(holder, None):
            store.release(holder)
        store.check(sizes)


def placed(n_slots: int, rooms: list[TokenRange], written: list[int]) -> Store:
    """A store with these ranges, of which so many tokens are written."""
    store = Store(n_slots)
    begin, fillers = 0, HOLDERS - 1
    for holder, room in enumerate(rooms):
        if room.begin > begin:
            store.ranges.reserve(fillers, room.begin - begin, store.written)
            fillers -= 1
        store.ranges.reserve(holder, room.size, store.written)
        begin = room.end
    for filler in range(fillers + 1, HOLDERS):
        store.ranges.release(filler)
    for holder, tokens in enumerate(written):
        while store.written[holder] < tokens:
            store.write(holder)
    assert store.written[: len(written)].tolist() == written
    assert [store.ranges.range_of(h) for h in range(len(rooms))] == rooms
    return store


ROOMS = [TokenRange(4, 8), TokenRange(14, 2), TokenRange(20, 4), TokenRange(27, 3)]
"""Between holes of 4, 2, 4, 3 and 2 slots in 32."""


def test_a_range_takes_the_smallest_hole_with_room() -> None:
    for size, begin in {1: 12, 2: 12, 3: 24, 4: 0}.items():
        store = placed(32, ROOMS, [])
        assert store.ranges.reserve(7, size, store.written) == ()
        assert store.ranges.range_of(7) == TokenRange(begin, size)


def test_the_neighbours_with_the_fewest_tokens_are_pushed_together() -> None:
    store = placed(32, ROOMS, [8, 2, 4, 3])
    moves = store.ranges.reserve(7, 6, store.written)
    assert moves == (Move(14, 12, 2),), "holes of 2 and 4 around the range of 2"
    assert store.ranges.range_of(7) == TokenRange(14, 6)
    store.make(moves)
    store.check({0: 8, 1: 2, 2: 4, 3: 3, 7: 6})


def test_only_written_tokens_move() -> None:
    store = placed(32, ROOMS, [4, 0, 0, 2])
    assert store.ranges.reserve(7, 9, store.written) == ()
    assert store.ranges.range_of(1) == TokenRange(12, 2)
    assert store.ranges.range_of(2) == TokenRange(14, 4)
    assert store.ranges.range_of(7) == TokenRange(18, 9), "the ranges without tokens made room"


def test_a_range_grows_in_place_where_the_hole_behind_it_has_room() -> None:
    store = placed(32, ROOMS, [8, 2, 4, 3])
    assert store.ranges.grow(1, 6, store.written) == ()
    assert store.ranges.range_of(1) == TokenRange(14, 6)


def test_a_range_grows_elsewhere_where_that_moves_less() -> None:
    """Of 12 and 2 tokens the second move, into a hole that the range leaves for it."""
    rooms = [TokenRange(0, 2), TokenRange(2, 12)]
    store = placed(24, rooms, [2, 12])
    moves = store.ranges.grow(0, 4, store.written)
    assert moves == (Move(0, 14, 2),)
    store.make(moves)
    store.check({0: 4, 1: 12})


@pytest.mark.parametrize("seed", seeds(20, 60))
def test_no_window_of_neighbours_has_fewer_tokens(seed: int) -> None:
    """All pairs of holes tried, for reservations that fit no hole, and for growth."""
    rng = np.random.default_rng(seed)
    begin, rooms = 0, []
    for _ in range(5):
        begin += int(rng.integers(0, 5))
        rooms.append(TokenRange(begin, 2 * int(rng.integers(1, 8))))
        begin = rooms[-1].end
    n_slots = begin + int(rng.integers(0, 5))
    written = [int(rng.choice([0, room.size])) for room in rooms]
    edges = [0, *(room.end for room in rooms)], [*(room.begin for room in rooms), n_slots]
    gaps = [right - left for left, right in zip(*edges, strict=True)]
    if not sum(gaps):
        return

    def cheapest(size: int, touching: int | None) -> int:
        return min(
            sum(written[first:last])
            for first, last in [*combinations(range(6), 2), *((i, i) for i in range(6))]
            if sum(gaps[first : last + 1]) >= size
            and (touching is None or first <= touching + 1 <= last)
        )

    size = int(rng.integers(1, sum(gaps) + 1))
    sizes = {holder: room.size for holder, room in enumerate(rooms)}
    store = placed(n_slots, rooms, written)
    assert store.make(store.ranges.reserve(7, size, store.written)) == cheapest(size, None)
    store.check(sizes | {7: size})
    for holder, room in enumerate(rooms):
        store = placed(n_slots, rooms, written)
        moved = store.make(store.ranges.grow(holder, room.size + size, store.written))
        elsewhere = written[holder] if max(gaps) >= room.size + size else moved
        assert moved == min(elsewhere, cheapest(size, holder))
        store.check(sizes | {holder: room.size + size})


def test_what_has_no_room_is_refused() -> None:
    store = placed(10, [TokenRange(0, 6)], [])
    with pytest.raises(ValueError, match=r"5 token slots for holder 1, .* 4 of 10 are free"):
        store.ranges.reserve(1, 5, store.written)
    with pytest.raises(ValueError, match="holder 0, which has 6"):
        store.ranges.reserve(0, 1, store.written)
    with pytest.raises(ValueError, match="11 token slots for holder 0, which has 6; 4 more"):
        store.ranges.grow(0, 11, store.written)
