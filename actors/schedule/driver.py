"""Driving micro-batches through a pipeline of stages, whichever way the stages are reached."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any, Protocol

from actors.messages import Finished, MicroBatch, Request, Sampled, TokenIds
from actors.schedule.latencies import LatencyRecord
from actors.schedule.scheduler import FollowsSchedule, Scheduler
from planner.scheduling import RequestSchedule


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
    states that wait between the stages. Requests are timed in `latencies`.
    """

    def __init__(
        self, scheduler: Scheduler, pipeline: Pipeline, latencies: LatencyRecord | None = None
    ) -> None:
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._latencies = latencies or LatencyRecord()
        self._under_way: deque[tuple[MicroBatch, Any]] = deque()
        self._lock = Lock()  # around changes that `slot_tokens` must not see halfway

    def slot_tokens(self) -> dict[int, tuple[str, TokenIds]]:
        with self._lock:
            return self._scheduler.slot_tokens()

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    @property
    def wants_requests(self) -> bool:
        return self._scheduler.wants_requests

    def run(self) -> Iterator[tuple[Finished, ...]]:
        """Run until the scheduler wants more requests or all have ended; yields those that end."""
        while not self._scheduler.wants_requests:
            if self.submit_next() is not None:
                continue
            if not self._under_way:
                return
            yield self.take_back()[2]

    def add(self, requests: Sequence[Request], last: bool) -> None:
        with self._lock:
            self._scheduler.add(requests, last)
        self._latencies.expect(requests)

    def cancel(self, custom_id: str) -> None:
        with self._lock:
            self._scheduler.cancel(custom_id)
        self._latencies.forget(custom_id)

    def take_age_s(self, custom_id: str) -> float | None:
        return self._latencies.take_age_s(custom_id)

    def follow(self, schedule: RequestSchedule) -> None:
        """Have the scheduler go by another schedule, where its policy has one; any thread may call
        this.
        """
        with self._lock:
            if isinstance(self._scheduler, FollowsSchedule):
                self._scheduler.follow(schedule)

    def submit_next(self) -> MicroBatch | None:
        """Submit the next micro-batch and return it; None where there is none now, or no room."""
        if len(self._under_way) >= self._scheduler.most_under_way:
            return None
        with self._lock:
            following = self._scheduler.next_batch()
        if following is None:
            return None
        batch, token_ids = following
        self._latencies.begin(batch.admitted)
        self._under_way.append((batch, self._pipeline.submit(batch, token_ids)))
        return batch

    def take_back(self) -> tuple[MicroBatch, Sampled, tuple[Finished, ...]]:
        """Wait for the first micro-batch under way; returns it with its tokens and the requests
        that ended with them.
        """
        batch, handle = self._under_way.popleft()
        sampled = self._pipeline.result(handle)
        with self._lock:
            finished = self._scheduler.complete(batch, sampled)
        self._latencies.end(finished)
        return batch, sampled, finished

    def drop(self) -> None:
        while self._under_way:
            self._pipeline.result(self._under_way.popleft()[1])
