"""A pool of unequal pipelines that share the rows of a run, as if they were one group."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from actors.live_group import AnyObserver, JoinedObserver, LiveGroup
from actors.recovery.policy import OnEvent, Teller, ignore_event
from actors.replicas.replica import PoolBoard, Replica, Restarts
from actors.replicas.run import SharedRun
from planner.plan.spec import PlanSpec
from quant.common.errors import StageLostError

INTERRUPT_S = 5.0
"""Seconds that replicas get to leave what they generate, which takes them about one, when the pool
ends; then their stages are ended, whatever they do."""

ENDED_S = 5.0
"""Seconds that a replica gets to notice this."""

MakeGroup = Callable[[PlanSpec, OnEvent], LiveGroup]
"""Makes the stages of a plan, which tell of their events so."""


class ReplicaPool(LiveGroup):
    """Context manager over replicas of `plans`, which share the requests of a run; `plan` has the
    stages of all of them.

    The pool is ready when its first replica is, and the
    others join it. A replica that cannot go on gives its requests to the others and is started
    again in the background as `restarts` say; `on_event` is told of that, and of the faults of
    each. When all are given up, a run raises `StageLostError`.
    """

    can_follow = False

    def __init__(
        self,
        plan: PlanSpec,
        plans: Sequence[PlanSpec],
        make: MakeGroup,
        on_event: OnEvent = ignore_event,
        restarts: Restarts = Restarts(),  # noqa: B008  (frozen)
    ) -> None:
        super().__init__(plan)
        teller = Teller(on_event)
        self._board = PoolBoard(teller.tell, restarts)
        self.replicas: tuple[Replica, ...] = ()
        first = 0
        for index, each in enumerate(plans):
            told = partial(teller.tell_of, f"replica {index}", first)
            make_own = partial(make, each, told)
            self.replicas += (Replica(index, each, make_own, self._board),)
            first += len(each.stages)
        self.observer = JoinedObserver(self._observers, [len(each.stages) for each in plans])

    @property
    def ready_plans(self) -> Sequence[PlanSpec]:
        return [each.plan for each in self.replicas if each.status == "ready"]

    def _observers(self, load_too: bool) -> Sequence[AnyObserver | None]:
        """What looks at the stages of each replica that is loaded, or may still load."""
        return [
            each.group.observer if each.group and (load_too or each.status == "ready") else None
            for each in self.replicas
        ]

    def _start(self) -> None:
        """Begin to load all; wait for the first that is ready, or raise why the first was not."""
        for replica in self.replicas:
            replica.start()
        with self._board.changed:
            self._board.changed.wait_for(self._is_settled)
            self._check_error()
            if not self._some("ready"):
                raise self.replicas[0].error or StageLostError("no replica could be loaded")

    def _some(self, *statuses: str) -> bool:
        return any(replica.status in statuses for replica in self.replicas)

    def _is_settled(self) -> bool:
        """Whether one replica is ready, or each has failed."""
        ready = self._some("ready") or not self._some("loading")
        return ready or self._board.error is not None

    def _check_error(self) -> None:
        if self._board.error is not None:
            raise self._board.error

    def _check(self) -> None:
        self._check_error()
        if self._some("loading", "ready", "away"):
            return
        last = max(self.replicas, key=lambda each: each.failed_s)
        raise StageLostError(
            f"all {len(self.replicas)} replicas are lost, at last {last.name}: {last.error}"
        ) from last.error

    def live(self) -> SharedRun:
        """Return a run whose tokens come as they are sampled; lost replicas get another chance."""
        return self._begin_run(whole=False)

    def whole_answers(self, waits: bool = True) -> SharedRun:
        """Return a run for whole answers, as `live`; no replica waits for full micro-batches."""
        return self._begin_run(whole=True)

    def _begin_run(self, whole: bool) -> SharedRun:
        plans, board = [each.plan for each in self.replicas], self._board
        if board.run is not None:
            board.run.interrupt()
        with board.changed:
            run = board.run = SharedRun(plans, whole, board.changed, self._check)
            board.error = None
            board.changed.notify_all()
        for replica in self.replicas:
            replica.start()
        return run

    def abandon(self) -> None:
        if self._board.run is not None:
            self._board.run.interrupt()
        with self._board.changed:
            self._board.changed.wait_for(
                lambda: not any(replica.is_generating for replica in self.replicas)
            )

    def _release(self) -> None:
        with self._board.changed:
            self._board.is_closing = True
            self._board.changed.notify_all()
        if self._board.run is not None:
            self._board.run.interrupt()
        for replica in self.replicas:
            if replica.status != "ready":
                replica.release()
        late = _late(self.replicas, INTERRUPT_S)
        for replica in late:
            replica.release()
        for replica in _late(late, ENDED_S):
            replica.release()  # what it started meanwhile


def _late(replicas: Sequence[Replica], limit_s: float) -> list[Replica]:
    """The `replicas` that have not ended within `limit_s`."""
    ends_s = time.monotonic() + limit_s
    return [each for each in replicas if not each.wait_ended(max(0.0, ends_s - time.monotonic()))]
