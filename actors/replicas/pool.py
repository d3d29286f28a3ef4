"""A pool of unequal pipelines that share the rows of a run, as if they were one group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType

from actors.messages import Finished, Request
from actors.recovery.policy import EventReporter, OnEvent, RecoveryEvent, ignore_event
from actors.replicas.group import Group
from actors.replicas.observer import PoolObserver
from actors.replicas.replica import Board, Replica
from actors.replicas.restarts import Restarts
from actors.replicas.shared_rows import SharedRows
from planner.plan.spec import PlanSpec
from quant.common.errors import StageLostError

INTERRUPT_S = 5.0
"""Seconds that replicas get to leave what they generate, which takes them about one, when the pool
ends; then their stages are ended, whatever they do."""

ENDED_S = 5.0
"""Seconds that a replica gets to notice this."""

MakeGroup = Callable[[PlanSpec, OnEvent], Group]
"""Makes the stages of a plan, which tell of their events so."""


class ReplicaPool:
    """Context manager over replicas of `plans`, with the face of one `StageGroup`; `plan` has the
    stages of all of them.

    Requests go to whichever has a free slot. The pool is ready when its first replica is, and the
    others join it. A replica that cannot go on gives its requests to the others and is started
    again in the background as `restarts` say; `on_event` is told of that, and of the faults of
    each. When all are given up, `generate` raises `StageLostError`.
    """

    def __init__(
        self,
        plan: PlanSpec,
        plans: Sequence[PlanSpec],
        make: MakeGroup,
        on_event: OnEvent = ignore_event,
        restarts: Restarts = Restarts(),  # noqa: B008  (frozen)
    ) -> None:
        self._plan = plan
        self._on_event = on_event
        self._telling = threading.Lock()
        self._board = Board(EventReporter(self._tell), restarts)
        self.replicas: tuple[Replica, ...] = ()
        first = 0
        for index, each in enumerate(plans):
            told = partial(self._tell_of, index, first)
            make_own = partial(make, each, told)
            self.replicas += (Replica(index, each, make_own, self._board),)
            first += len(each.stages)
        self.observer = PoolObserver(self.replicas)

    @property
    def plan(self) -> PlanSpec:
        """One plan with the stages of all replicas."""
        return self._plan

    def __enter__(self) -> ReplicaPool:
        """Begin to load all replicas, and wait for the first that is ready.

        Where none gets ready, raises what the first one could not be loaded for.
        """
        try:
            for replica in self.replicas:
                replica.start()
            with self._board.changed:
                self._board.changed.wait_for(self._is_settled)
                self._check_error()
                if not self._some("ready"):
                    raise self.replicas[0].error or StageLostError("no replica could be loaded")
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free the actors and placement groups of all replicas."""
        self._close()

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
        """Raise where the run cannot go on."""
        self._check_error()
        if self._some("loading", "ready", "away"):
            return
        last = max(self.replicas, key=lambda each: each.failed_s)
        raise StageLostError(
            f"all {len(self.replicas)} replicas are lost, at last {last.name}: {last.error}"
        ) from last.error

    def generate(
        self, requests: Iterable[Request | None], few: bool = False
    ) -> Iterator[tuple[Finished, ...]]:
        """Generate for any number of requests, which are read when a replica has a free slot for
        them; yields those that ended, and nothing in return for a None.

        Replicas that were given up before get another chance.
        """
        slots = [each.plan.workload.global_batch for each in self.replicas]
        rows, earlier = SharedRows(iter(requests), slots, self._board.changed), self._board.rows
        if earlier is not None:
            earlier.stop()
        with self._board.changed:
            self._board.rows, self._board.error = rows, None
            self._board.changed.notify_all()
        for replica in self.replicas:
            replica.start()
        return rows.results(self._check)

    def interrupt(self) -> None:
        """Have every replica leave what it generates."""
        if self._board.rows is not None:
            self._board.rows.stop()
        for replica in self.replicas:
            if replica.group is not None and replica.is_generating:
                replica.group.interrupt()

    def halt(self) -> tuple[Finished, ...]:
        """Stop the last `generate`, which must not be asked on; return what had finished and was
        not given out. `unfinished` has the rest.
        """
        self.abandon()
        return () if self._board.rows is None else self._board.rows.left_over()

    def abandon(self) -> None:
        """Give up what the last `generate` has in flight, which must not be asked on; the replicas,
        loaded as they are, are ready for another one.
        """
        self.interrupt()
        with self._board.changed:
            self._board.changed.wait_for(
                lambda: not any(replica.is_generating for replica in self.replicas)
            )

    def unfinished(self) -> tuple[Request, ...]:
        """Return the requests that the last `generate` took and did not give out."""
        return () if self._board.rows is None else self._board.rows.unfinished

    def tokens_in_flight(self) -> dict[str, int]:
        """Return the number of new tokens of each request in a KV slot, a second ago or so."""
        tokens: dict[str, int] = {}
        for replica in self.replicas:
            if replica.group is not None and replica.status == "ready":
                tokens |= replica.group.tokens_in_flight()
        return tokens

    def _close(self) -> None:
        """End all replicas; one that loads is ended with its stages."""
        with self._board.changed:
            self._board.is_closing = True
            self._board.changed.notify_all()
        self.interrupt()
        for replica in self.replicas:
            if replica.status != "ready":
                replica.release()
        late = _late(self.replicas, INTERRUPT_S)
        for replica in late:
            replica.release()
        for replica in _late(late, ENDED_S):
            replica.release()  # what it started meanwhile

    def _tell_of(self, index: int, first: int, event: RecoveryEvent) -> None:
        """Tell of an event of replica `index`, whose stages are those from number `first` on."""
        stage = None if event.stage is None else first + event.stage
        self._tell(replace(event, stage=stage, text=f"replica {index}: {event.text}"))

    def _tell(self, event: RecoveryEvent) -> None:
        with self._telling:
            self._on_event(event)


def _late(replicas: Sequence[Replica], limit_s: float) -> list[Replica]:
    """The `replicas` that have not ended within `limit_s`."""
    ends_s = time.monotonic() + limit_s
    return [each for each in replicas if not each.wait_ended(max(0.0, ends_s - time.monotonic()))]
