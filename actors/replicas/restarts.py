"""How often a replica that was lost is started again, and what that waits for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition

from actors.recovery.policy import OnDeviceLoss, Recovery
from quant.common.errors import DeviceLostError

MOST_PAUSE_S = 600.0
"""The longest pause: devices that come back are used within ten minutes."""


@dataclass(frozen=True)
class Restarts:
    """The `attempts` in a row at starting a lost replica again, the first after `pause_s` seconds,
    each following one after twice as many.

    `on_device_loss` as in `Recovery`: with "wait" attempts have no end, with "fail" a replica whose
    device is gone is not started again. No replica is planned again.
    """

    attempts: int = 5
    pause_s: float = 10.0
    on_device_loss: OnDeviceLoss = Recovery.on_device_loss

    def pause_before(self, attempt: int, error: Exception) -> float | None:
        """Seconds until this attempt, counted from 1, after `error`; None for no more."""
        is_device = isinstance(error, DeviceLostError)
        if self.on_device_loss == "fail" and is_device:
            return None
        if attempt > self.attempts and not (self.on_device_loss == "wait" and is_device):
            return None
        return min(MOST_PAUSE_S, self.pause_s * 2.0 ** min(attempt - 1, 30))


class LoadingTurns:
    """Lets replicas load at the same time on nodes of their own, and one after another on a node:
    so its memory and disk have one at a time to serve, and the later ones find packed layers.
    """

    def __init__(self, changed: Condition) -> None:
        self._changed = changed
        self._busy: set[str] = set()

    @contextmanager
    def on(self, nodes: Collection[str]) -> Iterator[None]:
        """Have `nodes` alone for the body of the `with` statement."""
        with self._changed:
            self._changed.wait_for(lambda: self._busy.isdisjoint(nodes))
            self._busy.update(nodes)
        try:
            yield
        finally:
            with self._changed:
                self._busy.difference_update(nodes)
                self._changed.notify_all()
