"""Looking at the stages of all replicas, as if they were those of one pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actors.replicas.replica import Replica
from actors.stage_figures import LayersLoaded, QueueDepth, StageStats
from actors.telemetry.observer import StageTrace

NO_QUEUE = QueueDepth(0, 0, 0, 0)


class PoolObserver:
    """Asks the stages of those `replicas` that take rows; of the others it tells the last figures,
    with an empty queue.

    The first stage of each replica has a queue, by which its figures begin.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = tuple(replicas)
        self._latest = [_nothing(len(each.plan.stages)) for each in replicas]

    def figures(self) -> tuple[StageStats, ...] | None:
        """Return the figures of every stage of every replica."""
        for index, replica in enumerate(self._replicas):
            group = replica.group
            found = group.observer.figures() if group and replica.status == "ready" else None
            first, *others = found or self._latest[index]
            if not found or first.queue is None:
                first = with_queue(first)
            self._latest[index] = (first, *others)
        return tuple(stats for each in self._latest for stats in each)

    def loading(self) -> Sequence[LayersLoaded | None]:
        """Return how far each stage is with loading; None where its replica has not begun."""
        told: list[LayersLoaded | None] = []
        for replica in self._replicas:
            group = replica.group
            told += group.observer.loading() if group else (None,) * len(replica.plan.stages)
        return told

    def align(self) -> None:
        """Estimate how the stages' clocks differ from this process's."""
        for replica in self._replicas:
            if replica.group and replica.status == "ready":
                replica.group.observer.align()

    def traces(self) -> tuple[StageTrace | None, ...]:
        """Return every stage's micro-batches; None for those of a replica that is lost."""
        told: list[StageTrace | None] = []
        for replica in self._replicas:
            if replica.group and replica.status == "ready":
                told += replica.group.observer.traces()
            else:
                told += (None,) * len(replica.plan.stages)
        return tuple(told)


def _nothing(stages: int) -> tuple[StageStats, ...]:
    """The figures of stages that have done nothing yet."""
    idle = StageStats(0.0, 0, 0, 0, 0, 0)
    return (with_queue(idle), *(idle,) * (stages - 1))


def with_queue(stats: StageStats) -> StageStats:
    """The figures of a first stage that has not led a run yet."""
    return replace(stats, queue=NO_QUEUE)
