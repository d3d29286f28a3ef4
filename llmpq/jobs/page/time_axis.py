"""Axis of the time for which a job ran, with ticks in the units people count in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MINUTE, _HOUR, _DAY = 60, 3600, 86400

STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(_MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
)
"""Seconds between ticks."""

MOST_TICKS = 5


@dataclass(frozen=True)
class TimeAxis:
    """Maps seconds to pixels: 0 is at `first`, `length_s` at `last`."""

    length_s: float
    first: float
    last: float

    def at(self, second: float) -> float:
        """The pixel of a second."""
        return self.first + (self.last - self.first) * min(1.0, max(0.0, second / self.length_s))

    @property
    def ticks(self) -> Sequence[tuple[float, str]]:
        """Pixels of round times, from 0 on, with their words."""
        step = next((each for each in STEPS if self.length_s / each <= MOST_TICKS), STEPS[-1])
        number = int(self.length_s / step)
        return [(self.at(each * step), _words(each * step)) for each in range(number + 1)]


def _words(seconds: int) -> str:
    if not seconds:
        return "0"
    for unit_s, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds % unit_s == 0:
            return f"{seconds // unit_s} {name}"
    minutes, rest = divmod(seconds, _MINUTE)
    return f"{minutes}:{rest:02} min" if minutes else f"{rest} s"
