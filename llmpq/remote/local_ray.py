"""Supervision of the Ray that a local run starts: its processes end with the run, and where they
have ended before, no call to Ray keeps the run from ending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from actors.processes.ray_head import (
    LOOK_S,
    Process,
    below_head,
    end_all,
    ended_process,
    lost_message,
)

LEAVE_S = 14.0
"""Seconds for a run whose Ray is gone to end; `ray.shutdown` takes 8 of them without GCS."""

GiveUp = Callable[[str], None]
"""Ends the process after saying what happened."""


class LocalHead:
    """Context manager around the work with a Ray of this process's own, and around leaving it.

    Where a process of its head has `ended` and the run is not over `LEAVE_S` later, as some call to
    Ray blocks it, `give_up` is called. Processes `below` those of the head are ended at the end:
    where the head's were killed, Ray's agents would live on for a minute.
    """

    def __init__(
        self,
        give_up: GiveUp | None = None,
        ended: Callable[[], str | None] = ended_process,
        below: Callable[[], Sequence[Process]] = below_head,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._give_up = give_up
        self._ended = ended
        self._below = below
        self._clock = clock
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmpq-head", daemon=True)
        self._found: list[Process] = []
        self._lost_s: float | None = None

    def __enter__(self) -> LocalHead:
        self._found = list(self._below())
        self._thread.start()
        return self

    def note_started(self) -> None:
        """Note processes that were started since: after `ray.shutdown` nobody can find them."""
        self._found += self._below()

    def __exit__(self, *error: object) -> None:
        self._left.set()
        self._thread.join()
        end_all(self._found)

    def _run(self) -> None:
        while not self._left.wait(LOOK_S):
            self.check()

    def check(self) -> None:
        """Check once whether the head still lives."""
        ended = self._ended()
        if ended is None:
            return
        now_s = self._clock()
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        if self._give_up is not None and now_s - self._lost_s >= LEAVE_S:
            end_all(self._found)
            self._give_up(lost_message(ended))
