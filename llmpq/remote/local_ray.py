"""Looking after the Ray that a local run starts: nothing of it stays behind, and where it is gone
no call to it keeps the run from ending.
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
"""In which a run whose Ray is gone comes to its end: `ray.shutdown` takes 8 s of it without GCS."""

GiveUp = Callable[[str], None]
"""Ends the process after saying what happened."""


class LocalHead:
    """Context manager around the work with a Ray of this process's own, and around leaving it.

    Where a process of its head has `ended` and the run is not over `LEAVE_S` later, as some call to
    Ray blocks it, `give_up` is told. What lies `below` the head's processes is ended in the end:
    where these were killed, Ray's agents would live on for a minute.
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
        """Begin to look."""
        self._found = list(self._below())
        self._thread.start()
        return self

    def note_started(self) -> None:
        """Take in what was started since: after `ray.shutdown` nobody can tell any more."""
        self._found += self._below()

    def __exit__(self, *error: object) -> None:
        """End what is still there."""
        self._left.set()
        self._thread.join()
        end_all(self._found)

    def _run(self) -> None:
        while not self._left.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Look once."""
        ended = self._ended()
        if ended is None:
            return
        now_s = self._clock()
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        if self._give_up is not None and now_s - self._lost_s >= LEAVE_S:
            end_all(self._found)
            self._give_up(lost_message(ended))
