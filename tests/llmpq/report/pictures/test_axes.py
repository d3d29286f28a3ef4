"""Axes: round numbers for any range, and room between them."""

from __future__ import annotations

import itertools
import math

import pytest

from llmpq.report.pictures.axes import MOST_TICKS, Axis, CountAxis


@pytest.mark.parametrize(
    "values",
    [(0.0,), (0.0, 1e-9), (1e-5, 3e-5), (0.2, 2.4), (999.0, 1001.0), (1e6, 9e6), (3.0, 3.0, 7.7)],
)
def test_ticks_are_round_and_within_the_axis(values: tuple[float, ...]) -> None:
    for axis in (Axis.over(values, 300.0, 20.0), Axis.from_zero(values, 300.0, 20.0)):
        ticks = [(pixel, float(text.replace(",", ""))) for pixel, text in axis.ticks]
        assert 2 <= len(ticks) <= MOST_TICKS
        assert all(20 <= pixel <= 300 for pixel, _ in ticks)
        steps = [b - a for (_, a), (_, b) in itertools.pairwise(ticks)]
        assert max(steps) == pytest.approx(min(steps))
        mantissa = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-9)
        assert any(mantissa == pytest.approx(n) for n in (1, 2, 5))
        assert all(axis.at(value) == pytest.approx(pixel) for pixel, value in ticks)


def test_counts_keep_room_and_the_first_ones_go_first() -> None:
    axis = CountAxis.over([8, 4096], 50.0, 500.0)
    shown = axis.ticks([96, 8, 4096, 97, 100, 512])
    assert [text for _, text in shown] == ["8", "96", "512", "4,096"]
    assert CountAxis.over([7], 0.0, 100.0).at(7) == 50
