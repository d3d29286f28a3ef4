"""When a log without a terminal gets its next line: soon at first, then once a minute."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_S = (5.0, 20.0)
"""Seconds after the beginning of the first lines, by which one sees that it works."""

EVERY_S = 60.0


class LogTimes:
    """Says when a line is due, `FIRST_S` after it was made and then every `EVERY_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._began_s = self._clock()
        self._first = list(FIRST_S)
        self._next_s = self._first.pop(0)

    @property
    def passed_s(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began_s

    def is_due(self) -> bool:
        """Whether a line is to be written now; it counts as written then."""
        passed_s = self.passed_s
        if passed_s < self._next_s:
            return False
        while self._first and self._first[0] <= passed_s:
            self._first.pop(0)
        self._next_s = self._first.pop(0) if self._first else passed_s + EVERY_S
        return True


def duration(seconds: float) -> str:
    """Seconds as 1:02:03, or as 2:03 below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def about(seconds: float) -> str:
    """Seconds in the words of an estimate: about 40 s, about 3 min, about 2.5 h."""
    if seconds < 10:
        return "a few seconds"
    if seconds < 90:
        return f"about {round(seconds / 10) * 10} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {round(seconds / 1800) / 2:g} h"
