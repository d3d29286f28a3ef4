"""Pretend stages of replicas: they finish requests, or are lost, when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from threading import Condition
from types import SimpleNamespace
from typing import Any

from actors.messages import Finished, Progress, Request, Sampling
from actors.recovery.faults import RunInterruptedError
from actors.recovery.policy import OnEvent, RecoveryEvent
from actors.replicas.pool import ReplicaPool
from actors.replicas.replica import Restarts

WAIT_S = 120.0
"""After so long a wait has failed; nothing that is right takes a thousandth of it."""
NO_END = 10**9


def requests(count: int) -> list[Request]:
    return [Request(str(i), (3,), 4, Sampling()) for i in range(count)]


def pretend_plan(slots: int, node: str) -> Any:
    """What a pool looks at of a plan."""
    stage = SimpleNamespace(node=node, accelerator="T4", degree=1)
    workload = SimpleNamespace(global_batch=slots, kv_tokens=10 * slots)
    sizes = SimpleNamespace(prefill=1)
    return SimpleNamespace(stages=(stage,), workload=workload, micro_batches=sizes)


class PretendLive:
    """A live run whose requests end in their order, as many as it `may` finish."""

    def __init__(self, group: PretendGroup) -> None:
        self.group, self.scene = group, group.scene
        self.held: dict[str, Request] = {}
        self.cancelled: set[str] = set()
        self.is_closed = self.is_interrupted = False

    def submit(self, *requests: Request) -> None:
        with self.scene.changed:
            self.held |= {each.custom_id: each for each in requests}
            self.scene.changed.notify_all()

    def cancel(self, custom_id: str) -> None:
        with self.scene.changed:
            self.held.pop(custom_id, None)
            self.cancelled.add(custom_id)

    def close(self) -> None:
        with self.scene.changed:
            self.is_closed = True
            self.scene.changed.notify_all()

    def interrupt(self) -> None:
        with self.scene.changed:
            self.is_interrupted = True
            self.scene.changed.notify_all()

    @property
    def in_slots(self) -> list[Request]:
        return list(self.held.values())[: self.group.plan.workload.global_batch]

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """With two tokens of each that has a slot."""
        slots = len(self.in_slots)
        return tuple(
            replace(each, generated=(7, 7)) if i < slots else each
            for i, each in enumerate(self.held.values())
        )

    @property
    def tokens_in_flight(self) -> dict[str, int]:
        return {request.custom_id: 1 for request in self.in_slots}

    def events(self) -> Iterator[tuple[Progress, ...]]:
        while (request := self._next()) is not None:
            self.scene.handled.append((self.group.index, request))
            tokens = (7,) * (request.max_new_tokens - len(request.generated))
            yield (Progress(request.custom_id, tokens, "length"),)

    def _next(self) -> Request | None:
        """The next request that ends, once one may."""
        with self.scene.changed:
            assert self.scene.changed.wait_for(self._has_news, WAIT_S)
            if self.is_interrupted:
                raise RunInterruptedError
            if self.group.error is not None:
                raise self.group.error
            if not self.held:
                return None
            self.scene.may[self.group.index] -= 1
            return self.held.pop(next(iter(self.held)))

    def _has_news(self) -> bool:
        if self.is_interrupted or self.group.error is not None:
            return True
        if not self.held:
            return self.is_closed
        index = self.group.index
        return self.scene.may[index] > 0 and self.scene.begins[index]()


class PretendGroup:
    """The face of a `LiveGroup`."""

    def __init__(self, scene: Scene, index: int, plan: Any, on_event: OnEvent) -> None:
        self.scene, self.index, self.plan, self.on_event = scene, index, plan, on_event
        self.observer = self
        self.error: Exception | None = None
        self.run = PretendLive(self)
        self.abandoned = 0

    def __enter__(self) -> PretendGroup:
        self.scene.load(self.index)
        return self

    def __exit__(self, *error: object) -> None:
        self.scene.released.append(self.index)

    def figures(self) -> None:
        return None

    def live(self) -> PretendLive:
        self.run = PretendLive(self)
        return self.run

    def whole_answers(self, waits: bool) -> PretendLive:
        assert not waits
        return self.live()

    def abandon(self) -> None:
        self.abandoned += 1


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
        return len(group.run.in_slots) == group.plan.workload.global_batch

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

    def until_all_take_part(self) -> None:
        board = self.pool._board
        with board.changed:
            assert board.changed.wait_for(
                lambda: board.run is not None and all(board.run._lives), WAIT_S
            )

    def run(self, source: Iterable[Request | None]) -> list[Finished]:
        return [each for finished in self.pool.generate(source) for each in finished]

    def texts(self) -> list[str]:
        return [event.text for event in self.events]
