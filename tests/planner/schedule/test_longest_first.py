"""Which request `s3` takes next: the longest that fits, unless one was overtaken too often."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.schedule.orca import Waiting
from planner.schedule.s3 import (
    LongestFirst,
    first_reservation_of,
)


def waiting_of(sizes: list[int]) -> list[Waiting]:
    return [Waiting(i, size, size) for i, size in enumerate(sizes)]


def pool_of(waiting: list[Waiting], most_overtakes: int = 10**6) -> LongestFirst:
    pool = LongestFirst(most_overtakes)
    for each in waiting:
        pool.add(each)
    return pool


def packed(sizes: list[int], free: int) -> list[int]:
    """The sizes that a pool gives to so much memory, in order."""
    pool = pool_of(waiting_of(sizes))
    taken = []
    while (following := pool.next(free)) is not None:
        pool.take(following)
        taken.append(following)
        free -= following.size
    assert len(pool) == len(sizes) - len(taken)
    return [each.size for each in taken]


@settings(max_examples=300)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=11), free=st.integers(0, 100))
def test_packing_is_decreasing_first_fit_and_near_the_best(sizes: list[int], free: int) -> None:
    """By the paper's own loop, and against all subsets: what is left free is less than the
    smallest that waits, and what is filled more than half of the best, unless all fit.
    """
    found, by_loop, left = packed(sizes, free), [], free
    for size in sorted(sizes, reverse=True):
        if size <= left:
            by_loop.append(size)
            left -= size
    assert found == by_loop
    sums = {0}
    for size in sizes:
        sums |= {each + size for each in sums}
    best = max(each for each in sums if each <= free)
    assert sum(found) <= best
    assert 2 * sum(found) >= best
    rest = list(sizes)
    for size in found:
        rest.remove(size)
    assert not rest or min(rest) > free - sum(found)


def test_packing_leaves_little_of_the_memory_of_many_requests() -> None:
    """Lengths as in the paper's data, of which hundreds are in a pool."""
    rng = np.random.default_rng(0)
    fills = [sum(packed(rng.integers(20, 500, 400).tolist(), 20_000)) / 20_000 for _ in range(50)]
    assert min(fills) > 0.999


def test_a_tie_goes_to_whoever_came_first() -> None:
    first = pool_of(waiting_of([3, 5, 5])).next(7)
    assert first is not None
    assert first.request == 1


def test_who_was_preempted_goes_before_all_others() -> None:
    """Of several the one that came first, and before it only who was overtaken too often."""
    first, *others = waiting_of([5, 4, 3, 2])
    urgent = [each._replace(is_urgent=True) for each in others]
    pool = pool_of([first, *urgent[1:]], most_overtakes=2)
    assert pool.next(2) is None
    for free, arrival in ((3, 2), (2, 3)):
        following = pool.next(free)
        assert following is not None
        assert following.request == arrival
        pool.take(following)
    pool.add(urgent[0])
    assert pool.next(4) is None, "the first one was overtaken twice"
    assert pool.next(5) is first


def test_numbers_may_come_in_any_order_and_grow_without_end() -> None:
    """Against a plain list: what is taken, given up and preempted long after it came."""
    rng, pool, waiting = np.random.default_rng(2), LongestFirst(3), dict[int, list[int]]()
    number, gone = 0, list[int]()
    for _ in range(3000):
        kind = rng.integers(0, 4)
        if kind == 0 or not waiting:
            number += int(rng.integers(1, 50))
            waiting[number] = [int(rng.integers(1, 40)), 0]
            pool.add(Waiting(number, 1, waiting[number][0]))
        elif kind == 1 and gone:
            again = gone.pop(int(rng.integers(0, len(gone))))
            waiting[again] = [int(rng.integers(1, 40)), 3]
            pool.add(Waiting(again, 1, waiting[again][0], is_urgent=True))
        elif kind == 2:
            left = sorted(waiting)[int(rng.integers(0, len(waiting)))]
            pool.give_up(left)
            del waiting[left]
        free = int(rng.integers(0, 45))
        held = min((n for n, (_, overtaken) in waiting.items() if overtaken >= 3), default=None)
        fitting = sorted((-size, n) for n, (size, _) in waiting.items() if size <= free)
        wanted = fitting[0][1] if fitting else None
        if held is not None:
            wanted = held if waiting[held][0] <= free else None
        found = pool.next(free)
        assert (found and found.request) == wanted
        assert len(pool) == len(waiting)
        if found is not None:
            pool.take(found)
            del waiting[found.request]
            gone.append(found.request)
            for n, each in waiting.items():
                each[1] += n < found.request


@pytest.mark.parametrize(
    ("expected", "generated", "size"),
    [(None, 0, 18), (3, 0, 13), (99, 0, 18), (0, 0, 11), (-5, 0, 11), (3, 5, 16), (3, 7, 18)],
)
def test_a_reservation_has_room_for_what_is_expected(
    expected: int | None, generated: int, size: int
) -> None:
    assert first_reservation_of(10, 18, expected, generated) == size
