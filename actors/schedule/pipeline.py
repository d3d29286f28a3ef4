"""Driving micro-batches through a pipeline of stages, whichever way the stages are reached."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any, Protocol

import torch

from actors.messages import Finished, MicroBatch, Sampled, StageStats, TokenIds
from actors.schedule.static import Scheduler
from actors.stage.stage import Stage
from planner.simulation.schedule import UNDER_WAY_PER_STAGE


class Pipeline(Protocol):
    """Stages in a row; micro-batches come back in the order in which they were submitted."""

    stages: int

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> Any:
        """Start a micro-batch of `token_ids` `[sum(counts)]`; returns what `result` takes."""

    def result(self, handle: Any) -> Sampled:
        """Wait for the micro-batch's sampled tokens."""


class LocalPipeline:
    """All stages in this process, one after the other: tests, and machines with one device."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self.stages = len(stages)

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> Sampled:
        """Compute the micro-batch now."""
        x: torch.Tensor | Sampled = torch.from_numpy(token_ids)
        for stage in self._stages:
            if isinstance(x, Sampled):
                raise ValueError("a stage before the last one sampled")
            x = stage.step(batch, x)
        return x if isinstance(x, Sampled) else self._stages[0].finish(batch, x)

    def result(self, handle: Sampled) -> Sampled:
        """What `submit` computed."""
        return handle

    def stats(self) -> tuple[StageStats, ...]:
        """Figures of every stage."""
        return tuple(stage.stats() for stage in self._stages)


class PipelineDriver:
    """Keeps a pipeline full with what `scheduler` says; micro-batches stay under way between runs.

    At most two micro-batches a stage are under way: enough to hide the hops, and a bound on the
    hidden states that wait between the stages.
    """

    def __init__(self, scheduler: Scheduler, pipeline: Pipeline) -> None:
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._limit = UNDER_WAY_PER_STAGE * pipeline.stages
        self._under_way: deque[tuple[MicroBatch, Any]] = deque()
        self._lock = Lock()  # around changes that `so_far` must not see halfway

    def so_far(self) -> dict[int, tuple[str, TokenIds]]:
        """By slot, the requests that have one, and their tokens; for any thread."""
        with self._lock:
            return self._scheduler.so_far()

    @property
    def under_way(self) -> int:
        """Micro-batches that were submitted and have not come back."""
        return len(self._under_way)

    def run(self) -> Iterator[tuple[Finished, ...]]:
        """Until the scheduler wants more requests or all have ended; yields those that end."""
        while not self._scheduler.wants_requests:
            room = len(self._under_way) < self._limit
            with self._lock:
                following = self._scheduler.next_batch() if room else None
            if following is not None:
                batch, token_ids = following
                self._under_way.append((batch, self._pipeline.submit(batch, token_ids)))
            elif self._under_way:
                batch, handle = self._under_way.popleft()
                sampled = self._pipeline.result(handle)
                with self._lock:
                    finished = self._scheduler.complete(batch, sampled)
                yield finished
            else:
                return

    def drop(self) -> None:
        """Wait for what is under way and forget it."""
        while self._under_way:
            self._pipeline.result(self._under_way.popleft()[1])


def drive(scheduler: Scheduler, pipeline: Pipeline) -> Iterator[tuple[Finished, ...]]:
    """Run a scheduler that has all of its requests dry; yields those that ended."""
    return PipelineDriver(scheduler, pipeline).run()
