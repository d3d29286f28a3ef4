"""Driving micro-batches through a pipeline of stages, whichever way the stages are reached."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from actors.messages import Finished, MicroBatch, Sampled, StageStats, TokenIds
from actors.scheduler import Scheduler
from actors.stage import Stage


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


def drive(scheduler: Scheduler, pipeline: Pipeline) -> Iterator[tuple[Finished, ...]]:
    """Run the scheduler dry; yields the requests that ended, micro-batch by micro-batch.

    At most two micro-batches a stage are under way: enough to hide the hops, and a bound on the
    hidden states that wait between the stages.
    """
    limit = 2 * pipeline.stages
    under_way: deque[tuple[MicroBatch, Any]] = deque()
    while True:
        following = scheduler.next_batch() if len(under_way) < limit else None
        if following is not None:
            batch, token_ids = following
            under_way.append((batch, pipeline.submit(batch, token_ids)))
        elif under_way:
            batch, handle = under_way.popleft()
            yield tuple(scheduler.complete(batch, pipeline.result(handle)))
        else:
            return
