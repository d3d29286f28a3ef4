"""Axes of pictures: values become pixels, and some of them get a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_TICKS = 6
LABEL_WIDTH = 44  # pixels that a number below an axis needs


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels; `low` and `high` are at `first` and `last`."""

    low: float
    high: float
    first: float
    last: float

    @classmethod
    def over(cls, values: Sequence[float], first: float, last: float) -> Axis:
        """An axis from the least to the greatest value, with a margin."""
        low, high = min(values), max(values)
        margin = 0.08 * (high - low) or abs(low) or 1.0
        return cls(max(0.0, low - margin), high + margin, first, last)

    @classmethod
    def from_zero(cls, values: Sequence[float], first: float, last: float) -> Axis:
        """An axis from zero to a margin above the greatest value."""
        return cls(0.0, 1.12 * max(values) or 1.0, first, last)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    @property
    def ticks(self) -> Sequence[tuple[float, str]]:
        """Pixels of round values, at most `MOST_TICKS`, with their numbers."""
        rough = (self.high - self.low) / (MOST_TICKS - 1)
        power = math.floor(math.log10(rough))
        step = min(
            (n * 10.0**power for n in (1, 2, 5, 10) if n * 10.0**power >= rough),
            default=10.0 ** (power + 1),
        )
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        first = math.ceil(self.low / step)
        values = [step * (first + number) for number in range(MOST_TICKS)]
        return [
            (self.at(value), f"{value:,.{decimals}f}") for value in values if value <= self.high
        ]


@dataclass(frozen=True)
class CountAxis:
    """Maps counts, or other values above 0, to pixels in proportion to their logarithm."""

    low: float
    high: float
    first: float
    last: float

    @classmethod
    def over(cls, counts: Sequence[float], first: float, last: float) -> CountAxis:
        """An axis from the least to the greatest count, at both ends a margin within the pixels."""
        margin = 0.06 * (last - first)
        return cls(min(counts), max(counts), first + margin, last - margin)

    def at(self, count: float) -> float:
        """The pixel of a count; the middle where there is only one."""
        if self.low == self.high:
            return (self.first + self.last) / 2
        share = math.log(count / self.low) / math.log(self.high / self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self, counts: Sequence[float]) -> Sequence[tuple[float, str]]:
        """Pixels of `counts`, earlier ones before later ones, as far as their numbers have room."""
        kept: dict[float, str] = {}
        for count in counts:
            pixel = self.at(count)
            if all(abs(pixel - other) >= LABEL_WIDTH for other in kept):
                kept[pixel] = f"{count:,.6g}"
        return sorted(kept.items())
