"""Axes: round numbers for any range, and room between them."""

from __future__ import annotations

import itertools
import math

import pytest

from llmpq.report.charts import MOST_TICKS, MOST_TIMES, Axis, spot, svg


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
    axis = Axis.of_counts([8, 4096], 50.0, 500.0)
    shown = axis.chosen([96, 8, 4096, 97, 100, 512])
    assert [text for _, text in shown] == ["8", "96", "512", "4,096"]
    assert Axis.of_counts([7], 0.0, 100.0).at(7) == 50


@pytest.mark.parametrize("length_s", [0.5, 4, 59, 61, 600, 3000, 86400, 9e5, 3e7])
def test_times_are_round_and_few(length_s: float) -> None:
    ticks = Axis(0.0, length_s, 0, 500).times
    assert 1 <= len(ticks) <= MOST_TIMES
    assert ticks[0] == (0, "0")
    assert len({text for _, text in ticks}) == len(ticks)
    assert all(0 <= at <= 500 for at, _ in ticks)


def test_texts_are_escaped_and_stay_text() -> None:
    drawn = str(svg((10, 10), "<&>", [spot(1, 2, '</title>"')]))
    assert 'aria-label="&lt;&amp;&gt;"' in drawn
    assert "<title>&lt;/title&gt;&#34;</title>" in drawn
