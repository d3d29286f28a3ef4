"""Pretend stages of replicas: they finish requests, or are lost, when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from threading import Condition
from types import SimpleNamespace
from typing import Any

from actors.messages import Finished, Request, Sampling
from actors.recovery.faults import RunInterruptedError
from actors.recovery.policy import OnEvent, RecoveryEvent
from actors.replicas.pool import ReplicaPool
from actors.replicas.restarts import Restarts

WAIT_S = 120.0
"""After so long a wait has failed; nothing that is right takes a thousandth of it."""
NO_END = 10**9


def requests(count: int) -> list[Request]:
    return [Request(str(i), (3,), 4, Sampling()) for i in range(count)]


def pretend_plan(slots: int, node: str) -> Any:
    """What a pool looks at of a plan."""
    stage = SimpleNamespace(node=node, accelerator="T4", degree=1)
    return SimpleNamespace(stages=(stage,), workload=SimpleNamespace(global_batch=slots))


class PretendGroup:
    """The face of a `StageGroup` whose requests end in their order, as many as it `may` finish."""

    def __init__(self, scene: Scene, index: int, plan: Any, on_event: OnEvent) -> None:
        self.scene, self.index, self.plan, self.on_event = scene, index, plan, on_event
        self.observer = self
        self.error: Exception | None = None
        self.in_slots: deque[Request] = deque()
        self.is_interrupted = False
        self.abandoned = 0

    def __enter__(self) -> PretendGroup:
        self.scene.load(self.index)
        return self

    def __exit__(self, *error: object) -> None:
        self.scene.released.append(self.index)

    def figures(self) -> None:
        return None

    def generate(
        self, source: Iterable[Request | None], few: bool = False
    ) -> Iterator[tuple[Finished, ...]]:
        assert few
        self.is_interrupted, self.in_slots = False, deque()
        wanted, is_read = iter(source), False
        while True:
            while not is_read and len(self.in_slots) < self.plan.workload.global_batch:
                request = next(wanted, None)
                is_read = request is None
                if request is not None:
                    with self.scene.changed:
                        self.in_slots.append(request)
                        self.scene.changed.notify_all()
            if not self.in_slots:
                return
            self._wait()
            request = self.in_slots.popleft()
            self.scene.handled.append((self.index, request))
            yield (Finished(request.custom_id, (7,) * request.max_new_tokens, "length"),)

    def _wait(self) -> None:
        """Wait until a request may finish."""
        with self.scene.changed:
            assert self.scene.changed.wait_for(self._has_news, WAIT_S)
            if self.is_interrupted:
                raise RunInterruptedError
            if self.error is not None:
                raise self.error
            self.scene.may[self.index] -= 1

    def _has_news(self) -> bool:
        if self.is_interrupted or self.error is not None:
            return True
        return self.scene.may[self.index] > 0 and self.scene.begins[self.index]()

    def interrupt(self) -> None:
        with self.scene.changed:
            self.is_interrupted = True
            self.scene.changed.notify_all()

    def abandon(self) -> None:
        self.abandoned += 1

    def halt(self) -> tuple[Finished, ...]:
        raise AssertionError("a pool does not switch plans")

    def tokens_in_flight(self) -> dict[str, int]:
        return {request.custom_id: 1 for request in self.in_slots}

    def unfinished(self) -> tuple[Request, ...]:
        """With two tokens of each."""
        return tuple(replace(request, generated=(7, 7)) for request in self.in_slots)


class Scene:
    """A pool of pretend groups with so many `slots` each, and what happens to them.

    `may` says how many more requests each may finish, and `begins` whether it may by now, which
    changes by what other replicas do; `loads` what each start of a replica raises.
    """

    def __init__(
        self, *slots: int, nodes: str = "abcdefgh", restarts: Restarts | None = None
    ) -> None:
        restarts = restarts or Restarts(pause_s=0.0)
        self.changed = Condition()
        self.may = [NO_END for _ in slots]
        self.begins: list[Callable[[], bool]] = [lambda: True for _ in slots]
        self.loads: dict[int, Callable[[], None]] = {}
        self.loaded: list[int] = []
        self.released: list[int] = []
        self.handled: list[tuple[int, Request]] = []
        self.events: list[RecoveryEvent] = []
        self.groups: dict[int, PretendGroup] = {}
        plans = [pretend_plan(each, node) for each, node in zip(slots, nodes, strict=False)]
        self.plans = {id(plan): index for index, plan in enumerate(plans)}
        self.pool = ReplicaPool(pretend_plan(0, ""), plans, self.make, self.hear, restarts)

    def make(self, plan: Any, on_event: OnEvent) -> Any:
        index = self.plans[id(plan)]
        with self.changed:
            self.groups[index] = PretendGroup(self, index, plan, on_event)
            self.changed.notify_all()
            return self.groups[index]

    def hear(self, event: RecoveryEvent) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def load(self, index: int) -> None:
        self.loads.get(index, lambda: None)()
        with self.changed:
            self.loaded.append(index)
            self.changed.notify_all()

    def let(self, index: int, count: int = NO_END) -> None:
        """Let a replica finish so many requests more."""
        with self.changed:
            self.may[index] += count
            self.changed.notify_all()

    def is_full(self, index: int) -> bool:
        """Whether all slots of a replica have requests."""
        group = self.groups[index]
        return len(group.in_slots) == group.plan.workload.global_batch

    def lose(self, index: int, error: Exception) -> None:
        with self.changed:
            self.groups[index].error = error
            self.changed.notify_all()

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for what another thread does to the groups or tells."""
        with self.changed:
            assert self.changed.wait_for(holds, WAIT_S)

    def until_all_ready(self) -> None:
        changed = self.pool._board.changed
        with changed:
            assert changed.wait_for(
                lambda: all(each.status == "ready" for each in self.pool.replicas), WAIT_S
            )

    def until_all_want(self) -> None:
        """Wait until every replica has a free slot and asks for a request."""
        board = self.pool._board
        with board.changed:
            assert board.changed.wait_for(
                lambda: board.rows is not None and len(board.rows._wanting) == len(self.may), WAIT_S
            )

    def run(self, source: Iterable[Request | None]) -> list[Finished]:
        return [each for finished in self.pool.generate(source) for each in finished]

    def texts(self) -> list[str]:
        return [event.text for event in self.events]
