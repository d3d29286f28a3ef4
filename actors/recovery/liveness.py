"""The driver's watch over the stages: one that gives no sign of life, or none of progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from actors.processes.health import Pulse, SoFar
from actors.processes.ray_head import check_head
from quant.common.errors import DeviceError, StageLostError

SNAPSHOT_S = 1.0
"""How often the first stage is asked for tokens: what is computed in this time is lost with it."""

_AWAY_S = 5.0  # longer between two looks: whoever takes the results took a while, no stage did


class HangError(StageLostError):
    """A stage that does nothing for too long (`stage` None: nobody knows which)."""

    def __init__(self, message: str, stage: int | None) -> None:
        super().__init__(message)
        self.stage = stage


class Watch:
    """Asks every stage for its pulse, without waiting; `get` is `ray.get` with errors that name
    stages. Progress is not needed while shards are loaded. `so_far`: the tokens that the first
    stage last told.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        hang_s: float,
        get: Callable[[Any], Any],
        needs_progress: bool = True,
        clock: Callable[[], float] = time.monotonic,
        is_there: Callable[[Any], bool] | None = None,
    ) -> None:
        self._actors = actors
        self._hang_s = hang_s
        self.get = get
        self._needs_progress = needs_progress
        self._clock = clock
        self._is_there = is_there or _is_there
        self.interval_s = min(SNAPSHOT_S, hang_s / 4)
        self.so_far: SoFar | None = None
        self._pulses: dict[int, Pulse] = {}
        self._asked: dict[int, tuple[Any, float]] = {}
        self._looked_s = self._moved_s = clock()
        self._done: dict[int, int] = {}

    def look(self) -> None:
        """Take in answers and ask again, where it is time; raises `HangError`, and `HeadLostError`
        where Ray is gone.
        """
        now_s = self._clock()
        since_s = now_s - self._looked_s
        if self._asked and since_s < self.interval_s:
            return
        check_head()
        if since_s > _AWAY_S:
            self._forgive(since_s)
        self._looked_s = now_s
        for index, actor in enumerate(self._actors):
            self._take(index, now_s)
            if index not in self._asked:
                self._asked[index] = (actor.pulse.remote(index == 0), now_s)
        if self._needs_progress:
            self._check_progress(now_s)

    def _forgive(self, seconds: float) -> None:
        self._moved_s += seconds
        self._asked = {i: (ref, asked_s + seconds) for i, (ref, asked_s) in self._asked.items()}

    def _take(self, index: int, now_s: float) -> None:
        if index not in self._asked:
            return
        reference, asked_s = self._asked[index]
        if self._is_there(reference):
            self._pulses[index] = pulse = self.get(reference)
            self.so_far = self.so_far if pulse.so_far is None else pulse.so_far
            del self._asked[index]
        elif now_s - asked_s > self._hang_s:
            raise HangError(f"stage {index} gave no sign of life for {self._hang_s:g} s", index)

    def _check_progress(self, now_s: float) -> None:
        done = {index: pulse.done for index, pulse in self._pulses.items()}
        held = any(pulse.is_held for pulse in self._pulses.values())
        if done != self._done or held:  # an emulated device that takes its time is no hang
            self._done, self._moved_s = done, now_s
        if not self._pulses or now_s - self._moved_s <= self._hang_s:
            return
        slowest = max(self._pulses, key=lambda index: self._pulses[index].computing_s)
        seconds = self._pulses[slowest].computing_s
        if seconds > self._hang_s / 2:
            raise HangError(f"stage {slowest} computes since {seconds:.0f} s and hangs", slowest)
        raise HangError(f"no micro-batch moved for {self._hang_s:g} s", None)


def get_watched(references: Sequence[Any], watch: Watch, limit_s: float) -> list[Any]:
    """What all of `references` stand for; the first that fails raises.

    Raises `HangError` for a stage that gives no sign of life, `DeviceError` after `limit_s`.
    """
    ends_s = time.monotonic() + limit_s
    pending = list(references)
    while pending:
        done, pending = ray.wait(pending, timeout=watch.interval_s)
        watch.get(done)
        if pending:
            watch.look()
        if pending and not done and time.monotonic() > ends_s:
            raise DeviceError(f"stages were not ready within {limit_s:g} s")
    found: list[Any] = watch.get(list(references))
    return found


def _is_there(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0)[0])
