"""Looking at stages that prefill and stages that decode, as if they were those of one pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from actors.replicas.observer import with_queue
from actors.stage_figures import LayersLoaded, StageStats
from actors.telemetry.observer import Observer, StageTrace


class DividedObserver:
    """Asks the stages of several pipelines, in their order, by the observer of each.

    The first stage of each has a queue, by which its figures begin.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def figures(self) -> tuple[StageStats, ...] | None:
        """Return the figures of every stage; None unless all answer."""
        told: list[StageStats] = []
        for observer in self._observers:
            found = observer.figures()
            if found is None:
                return None
            first, *others = found
            told += [first if first.queue is not None else with_queue(first), *others]
        return tuple(told)

    def loading(self) -> Sequence[LayersLoaded | None]:
        """Return how far each stage is with loading."""
        return [each for observer in self._observers for each in observer.loading()]

    def align(self) -> None:
        """Estimate how the stages' clocks differ from this process's."""
        for observer in self._observers:
            observer.align()

    def traces(self) -> tuple[StageTrace | None, ...]:
        """Return every stage's micro-batches."""
        return tuple(each for observer in self._observers for each in observer.traces())
