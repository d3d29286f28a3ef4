"""Driving micro-batches through a pipeline of stages, whichever way the stages are reached."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from threading import Lock
from typing import Any, Protocol

from actors.messages import Finished, MicroBatch, Sampled, TokenIds
from actors.schedule.scheduler import Scheduler


class Pipeline(Protocol):
    """Stages in a row; micro-batches come back in the order in which they were submitted."""

    stages: int

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> Any:
        """Start a micro-batch of `token_ids` `[sum(counts)]`; returns a handle for `result`."""

    def result(self, handle: Any) -> Sampled:
        """Wait for the micro-batch's sampled tokens."""


class PipelineDriver:
    """Keeps a pipeline full with the micro-batches of `scheduler`, also from one run to the next.

    At most as many micro-batches are under way as the policy allows, which also bounds the hidden
    states that wait between the stages.
    """

    def __init__(self, scheduler: Scheduler, pipeline: Pipeline) -> None:
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._under_way: deque[tuple[MicroBatch, Any]] = deque()
        self._lock = Lock()  # around changes that `slot_tokens` must not see halfway

    def slot_tokens(self) -> dict[int, tuple[str, TokenIds]]:
        """Return `Scheduler.slot_tokens`; any thread may call this."""
        with self._lock:
            return self._scheduler.slot_tokens()

    @property
    def under_way(self) -> int:
        """Number of micro-batches that were submitted and have not come back."""
        return len(self._under_way)

    def run(self) -> Iterator[tuple[Finished, ...]]:
        """Run until the scheduler wants more requests or all have ended; yields those that end."""
        while not self._scheduler.wants_requests:
            room = len(self._under_way) < self._scheduler.most_under_way
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
        """Wait for the micro-batches under way and forget them."""
        while self._under_way:
            self._pipeline.result(self._under_way.popleft()[1])
