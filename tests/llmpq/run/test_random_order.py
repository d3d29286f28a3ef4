"""Rows in random order: all of them once, spread over the run, and none waited for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmpq.run.rows_in_flight import in_random_order


def test_every_row_comes_once_and_sorted_ones_are_mixed() -> None:
    rows = range(4000)
    found = list(in_random_order(iter(rows)))
    assert sorted(found) == list(rows)
    assert found == list(in_random_order(iter(rows)))
    assert abs(float(np.corrcoef(found[1000:3000], range(2000))[0, 1])) < 0.95
    neighbours = np.abs(np.diff(found[1000:3000]))
    assert float(np.mean(neighbours)) > 300


def test_few_rows_are_read_ahead() -> None:
    read: list[int] = []

    def slow() -> Iterator[int]:
        for row in range(100):
            read.append(row)
            yield row

    order = in_random_order(slow(), most_waiting=10)
    for given in range(1, 101):
        next(order)
        assert given <= len(read) <= min(2 * given, given + 9)
    assert list(order) == []
