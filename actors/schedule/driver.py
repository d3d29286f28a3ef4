"""Driving micro-batches through a pipeline of stages, and timing the requests in them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, Protocol

import numpy as np

from actors.logprobs import LogprobRows
from actors.messages import Admission, Finished, HeadId, MicroBatch, Request, Sampled, TokenIds
from actors.schedule.heads import PromptHeads
from actors.schedule.scheduler import Scheduler
from actors.stage_figures import BUCKETS, LatencyCounts, bucket_of
from planner.scheduling import RequestSchedule


class PromptScores:
    """The prompts in slots that are scored, and what is known of each so far. Every micro-batch
    passes `with_scores` on its way to the stages, and `take_in` when it is back.
    """

    def __init__(self) -> None:
        self._computing: dict[int, int] = {}  # tokens that are scored at most, by slot
        self._found: dict[int, list[LogprobRows]] = {}  # by slot

    def with_scores(self, batch: MicroBatch, requests: Mapping[int, Request]) -> MicroBatch:
        """Have the stages score what `batch` has of prompts of `requests`, which are by slot."""
        for each in batch.admitted:
            self._computing.pop(each.slot, None)
            self._found.pop(each.slot, None)
            if requests[each.slot].scores_prompt:
                self._computing[each.slot] = len(requests[each.slot].prompt_ids) - 1
        if not self._computing:
            return batch
        ends = [self._computing.get(slot, 0) for slot in batch.slots.tolist()]
        scored = np.clip(np.array(ends, dtype=np.int64) - batch.starts, 0, batch.counts)
        for slot in batch.slots[batch.sampled_rows].tolist():  # whose prompts are whole
            self._computing.pop(slot, None)
        return replace(batch, scored=scored) if scored.any() else batch

    def take_in(self, batch: MicroBatch, sampled: Sampled) -> None:
        """Keep the scores of the prompts of `batch` until they are taken."""
        if batch.scored is None or sampled.logprobs is None:
            return
        first = len(sampled.token_ids)
        rows = zip(batch.slots.tolist(), batch.starts.tolist(), batch.scored.tolist(), strict=True)
        for slot, start, count in rows:
            if count:
                found = sampled.logprobs.between(first, first + count, start + 1)
                self._found.setdefault(slot, []).append(found)
            first += count

    def take(self, slot: int) -> LogprobRows | None:
        """The scores of the prompt in a slot, once; None where none were asked for."""
        return LogprobRows.joined(self._found.pop(slot, []))


MOST_BEGUN = 2**16
"""Requests whose beginning is kept at most, the latest ones: far more than are in flight."""

UNSEEN = 2**14
"""Latencies that are kept until metrics are published next."""


class LatencyRecord:
    """Counts requests by their latency; other threads may read the counts at any time.

    What a request waits before its prefill is submitted does not count. One that comes back with
    tokens, after a fault or because it was preempted, began when it was prefilled first; where that
    is not known, as it was in a process that died, it is not counted. Nor is one that ends in an
    error, or with which other stages go on: these are told its age, and count it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began_s: dict[str, float] = {}
        self._goes_on: dict[str, None] = {}  # on other stages, unless it ends by itself
        self._ages_s: dict[str, float] = {}  # of those that did
        self._counts = np.zeros(BUCKETS, dtype=np.int64)
        self._unseen: deque[float] = deque(maxlen=UNSEEN)

    @property
    def counts(self) -> LatencyCounts:
        counts = self._counts.copy()
        found = np.flatnonzero(counts)
        return LatencyCounts(tuple(zip(found.tolist(), counts[found].tolist(), strict=True)))

    def expect(self, requests: Sequence[Request]) -> None:
        """Note the age of requests that will come, and whether other stages go on with them."""
        now_s = self._clock()
        for each in requests:
            if each.age_s is not None:
                self._began_s[each.custom_id] = now_s - each.age_s
            if each.host_key is not None and not each.generated:
                self._goes_on[each.custom_id] = None
        _keep_latest(self._goes_on)

    def begin(self, admitted: Sequence[Admission]) -> None:
        now_s = self._clock()
        for each in admitted:
            if not each.generated and not isinstance(each.custom_id, HeadId):
                self._began_s.pop(each.custom_id, None)  # of another run
                self._began_s[each.custom_id] = now_s
        _keep_latest(self._began_s)

    def end(self, finished: Sequence[Finished]) -> None:
        """Count requests that have ended, here."""
        now_s = self._clock()
        for each in finished:
            began_s = self._began_s.pop(each.custom_id, None)
            goes_on = each.custom_id in self._goes_on and each.finish_reason == "length"
            self._goes_on.pop(each.custom_id, None)
            if began_s is not None and goes_on:
                self._ages_s[each.custom_id] = now_s - began_s
                _keep_latest(self._ages_s)
            elif began_s is not None and each.finish_reason != "error":
                self._counts[bucket_of(now_s - began_s)] += 1
                self._unseen.append(now_s - began_s)

    def forget(self, custom_id: str) -> None:
        self._began_s.pop(custom_id, None)
        self._ages_s.pop(custom_id, None)
        self._goes_on.pop(custom_id, None)

    def take_age_s(self, custom_id: str) -> float | None:
        """Return, once, a request's age when it left for other stages; None if it did not."""
        return self._ages_s.pop(custom_id, None)

    def new_seconds(self) -> list[float]:
        return [self._unseen.popleft() for _ in range(len(self._unseen))]


def _keep_latest(known: dict[str, Any]) -> None:
    """Forget what was known first, where it is too much: its requests were given up."""
    while len(known) > MOST_BEGUN:
        del known[next(iter(known))]


class Pipeline(Protocol):
    """Stages in a row; micro-batches come back in the order in which they were submitted."""

    stages: int

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> Any:
        """Start a micro-batch of `token_ids` `[sum(counts)]`; returns a handle for `result`."""

    def result(self, handle: Any) -> Sampled: ...


class PipelineDriver:
    """Keeps a pipeline full with the micro-batches of `scheduler`, also from one run to the next.

    At most as many micro-batches are under way as the policy allows, which also bounds the hidden
    states that wait between the stages. Requests are timed in `latencies`; `heads` that they share
    go to the scheduler before them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: Pipeline,
        latencies: LatencyRecord | None = None,
        heads: PromptHeads | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._latencies = latencies or LatencyRecord()
        self._heads = heads or PromptHeads(0)
        self._scores = PromptScores()
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
        return self._scheduler.wants_requests and not self._heads.waiting

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting + self._heads.waiting

    def shared_tokens(self, slot: int) -> int:
        """How many tokens of the prompt in a slot are restored, and not computed."""
        return self._scheduler.requests[slot].shared_tokens

    def take_prompt_logprobs(self, slot: int) -> LogprobRows | None:
        """Those of the prompt in a slot, once, when its first new token has come."""
        return self._scores.take(slot)

    def expect(self, requests: Sequence[Request]) -> None:
        """Make ready for `requests`. SpecError for one that can never run."""
        self._scheduler.expect(requests)

    def add(self, requests: Sequence[Request]) -> None:
        with self._lock:
            self._scheduler.add(self._heads.place(requests))
        self._latencies.expect(requests)

    def cancel(self, custom_id: str) -> None:
        with self._lock:
            self._heads.end(custom_id)
            self._scheduler.cancel(custom_id)
        self._latencies.forget(custom_id)

    def take_age_s(self, custom_id: str) -> float | None:
        return self._latencies.take_age_s(custom_id)

    def follow(self, schedule: RequestSchedule) -> None:
        """Have the scheduler go by another schedule; any thread may call this."""
        with self._lock:
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
            ready: list[Request] = []
            if self._heads.most_tokens:
                batch, ready = self._heads.with_copies(batch, self._scheduler.requests)
            if ready:
                self._scheduler.add(ready)
            batch = self._scores.with_scores(batch, self._scheduler.requests)
        self._latencies.begin(batch.admitted)
        self._under_way.append((batch, self._pipeline.submit(batch, token_ids)))
        return batch

    def take_back(self) -> tuple[MicroBatch, Sampled, tuple[Finished, ...]]:
        """Wait for the first micro-batch; returns it, its tokens and the requests that ended, but
        no heads.
        """
        batch, handle = self._under_way.popleft()
        sampled = self._pipeline.result(handle)
        self._scores.take_in(batch, sampled)
        with self._lock:
            ended = self._scheduler.complete(batch, sampled)
            for each in ended:
                self._heads.end(each.custom_id)
        finished = tuple(each for each in ended if not isinstance(each.custom_id, HeadId))
        self._latencies.end(finished)
        return batch, sampled, finished

    def drop(self) -> None:
        while self._under_way:
            self._pipeline.result(self._under_way.popleft()[1])
