"""One replica: a thread that loads its stages, generates, and starts lost ones again, as often as
that is worth it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Literal

from ray.exceptions import RayError

from actors.live_group import LiveGroup
from actors.processes.ray_head import check_head
from actors.recovery.faults import RunInterruptedError
from actors.recovery.policy import OnDeviceLoss, OnEvent, Recovery, RecoveryEvent
from actors.replicas.run import SharedRun
from planner.fleet.fleet_spec import make_up_text
from planner.plan.spec import PlanSpec
from quant.common.errors import DeviceError, DeviceLostError, HeadLostError, StageLostError

Status = Literal["loading", "ready", "away", "gone"]
"""Loading for the first time, taking rows, lost and to be started again, or given up."""

LOSSES = (StageLostError, DeviceError, RayError)
"""Errors that a replica is lost by alone; by all others the run ends."""


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


@dataclass(eq=False)
class PoolBoard:
    """What a pool and the threads of its replicas tell each other; `changed` guards all of it.

    `run` is the present one. `error` ends it, whatever the other replicas do.
    """

    on_event: OnEvent
    restarts: Restarts
    changed: Condition = field(default_factory=Condition)
    run: SharedRun | None = None
    error: Exception | None = None
    is_closing: bool = False
    loading_nodes: set[str] = field(default_factory=set)

    @contextmanager
    def loading_on(self, nodes: Collection[str]) -> Iterator[None]:
        """Have `nodes` alone for the body of the `with` statement.

        Replicas load at the same time on nodes of their own, and one after another on a node: so
        its memory and disk have one at a time to serve, and the later ones find packed layers.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.loading_nodes.isdisjoint(nodes))
            self.loading_nodes.update(nodes)
        try:
            yield
        finally:
            with self.changed:
                self.loading_nodes.difference_update(nodes)
                self.changed.notify_all()


class Replica:
    """Replica `index` of a pool, whose stages `make` makes; `error` is what it was lost by last."""

    def __init__(
        self, index: int, plan: PlanSpec, make: Callable[[], LiveGroup], board: PoolBoard
    ) -> None:
        self.index, self.plan = index, plan
        self.name = f"replica {index} ({make_up_text(plan)})"
        self.status: Status = "loading"
        self.is_generating = False
        self.group: LiveGroup | None = None
        self.error: Exception | None = None
        self.failed_s = 0.0  # of the monotonic clock
        self._make, self._board = make, board
        self._attempts = 0  # in a row, after which no row finished
        self._given_back = 0  # requests that it had when it was lost
        self._lost_s: float | None = None
        self._thread: Thread | None = None

    def start(self) -> None:
        """Load in the background, unless that is going on or done; also after it was given up."""
        if self._thread is not None and self._thread.is_alive():
            if self.status != "gone":
                return
            self._thread.join()  # it has told so, and ends
        self.status, self._attempts = "loading", 0
        name = f"llmpq-replica-{self.index}"
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait_ended(self, limit_s: float) -> bool:
        """Wait until the thread has ended, which it does when the board is closing."""
        if self._thread is not None:
            self._thread.join(limit_s)
        return self._thread is None or not self._thread.is_alive()

    def release(self) -> None:
        if self.group is not None:
            with suppress(RayError):  # with Ray they are gone too
                self.group.__exit__(None, None, None)

    def _run(self) -> None:
        try:
            while self._live_once():
                pass
        except Exception as error:
            with self._board.changed:
                self._board.error = self._board.error or error
                self.status = "gone"
                self._board.changed.notify_all()
        finally:
            self.release()

    def _live_once(self) -> bool:
        """Load, and generate until it is lost; returns whether to do so again."""
        try:
            self._load()
            self._serve()
        except HeadLostError:
            raise
        except LOSSES as error:
            check_head()
            return self._lose(error)
        return False

    def _load(self) -> None:
        with self._board.loading_on({stage.node for stage in self.plan.stages}):
            if self._board.is_closing:
                return
            self.group = self._make()
            self.group.__enter__()
        with self._board.changed:
            self.status = "ready"
            self._board.changed.notify_all()
        if self._lost_s is not None:
            away_s = time.monotonic() - self._lost_s
            self._tell(f"{self.name} is back after {away_s:.0f} s and takes rows again")
            self._lost_s = None

    def _serve(self) -> None:
        """Generate for one run after the other until the board is closing."""
        while (run := self._next_run()) is not None:
            assert self.group is not None, "it is loaded"
            try:
                live = self.group.whole_answers(False) if run.is_whole else self.group.live()
                run.join(self.index, live)
                for told in live.events():
                    if run.take(self.index, told):
                        self._attempts = 0
            except RunInterruptedError:
                if not self._board.is_closing:
                    self.group.abandon()
            finally:
                with self._board.changed:
                    self.is_generating = False
                    self._given_back = run.leave(self.index)

    def _next_run(self) -> SharedRun | None:
        """The present run, once there is something to do for it; None when it is closing."""
        board = self._board
        with board.changed:
            while not board.is_closing:
                if board.run is not None and not board.run.has_ended:
                    self.is_generating = True
                    return board.run
                board.changed.wait()
        return None

    def _lose(self, error: Exception) -> bool:
        """Wait for the next attempt; False where there is none."""
        board = self._board
        self.release()
        self.group = None
        if board.is_closing:
            return False
        self.error, self.failed_s = error, time.monotonic()
        self._lost_s = self._lost_s or self.failed_s
        self._attempts += 1
        pause_s = board.restarts.pause_before(self._attempts, error)
        rows, self._given_back = self._given_back, 0
        with board.changed:
            self.status = "gone" if pause_s is None else "away"
            board.changed.notify_all()
        self._tell(self._loss_text(error, rows, pause_s))
        if pause_s is None:
            return False
        with board.changed:
            board.changed.wait_for(lambda: board.is_closing, pause_s)
        return not board.is_closing

    def _loss_text(self, error: Exception, rows: int, pause_s: float | None) -> str:
        why, *_ = str(error).splitlines() or [type(error).__name__]  # Ray's have many lines
        text = f"{self.name} is lost: {why}"
        if isinstance(error, DeviceLostError) and self._board.restarts.on_device_loss == "replan":
            text += "; the pipelines of a fleet are not planned again"
        if rows:
            text += f"; its {rows} rows go to the others"
        if pause_s is None:
            return f"{text}; it is given up"
        return f"{text}; it is started again in {pause_s:.0f} s"

    def _tell(self, text: str) -> None:
        self._board.on_event(RecoveryEvent("replica", None, 0.0, text))
