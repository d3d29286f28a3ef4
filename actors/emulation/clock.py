"""The clock of an emulated stage: it waits for modelled times, and its lateness does not add up."""

from __future__ import annotations

import time
from collections.abc import Callable

SPIN_S = 2e-4
"""The last part of a wait is a busy loop: sleeps of 1 to 10 ms ended 0.1 ms late (median)."""


class EmulatedClock:
    """The modelled time that one process has reached, and how late it really is.

    `now_s` must be a clock that all processes of the machine share; `sleep` may end late.
    """

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.now_s = now_s
        self._sleep = sleep
        self.reached_s = 0.0
        self._late_s = 0.0  # from `reached_s` until the process woke up
        self.is_waiting = False  # may be read by any thread

    def wait_until(self, ready_at_s: float) -> None:
        """Wait for something that takes its modelled time."""
        now_s = self.now_s()
        if now_s < ready_at_s:
            self.is_waiting = True
            while now_s < ready_at_s:
                if ready_at_s - now_s > SPIN_S:
                    self._sleep(ready_at_s - now_s - SPIN_S)
                now_s = self.now_s()
            self.is_waiting = False
            self.reached_s, self._late_s = ready_at_s, now_s - ready_at_s
        elif ready_at_s > self.reached_s:
            self.reached_s, self._late_s = now_s, 0.0

    def modelled_s(self, now_s: float) -> float:
        """The modelled time at the clock's `now_s`: without the lateness of the last wait."""
        return max(self.reached_s, now_s - self._late_s)
