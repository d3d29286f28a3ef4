"""A job of rows in virtual time: any scheduler on stages that take their modelled seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.messages import Admission, MicroBatch, Request, Sampled, Sampling, TokenIds
from actors.schedule.driver import PipelineDriver
from actors.schedule.s3 import S3Scheduler
from actors.schedule.scheduler import Scheduler
from benchmarks.reproduction.lengths.on_demand import OnDemandScheduler
from benchmarks.reproduction.lengths.rows import IntArray, Rows
from benchmarks.reproduction.orca.virtual_time import VirtualClock, VirtualPipeline
from planner.plan.modelled_times import ModelledTimes

AT_ONCE = 256
"""Rows that a scheduler is given when it wants more."""


@dataclass(frozen=True)
class CacheCosts:
    """Seconds of the slowest stage for each token that is moved within its KV cache, and for each
    that goes to host memory or comes back.
    """

    move_s: float
    park_s: float


@dataclass
class JobRun:
    """What a job took: seconds of virtual time, those of the scheduler's own Python, iterations,
    and the requests that held memory in each of them; tokens that were moved and parked, how often
    a request was preempted, and the tokens that were computed again for that.
    """

    tokens: int
    seconds: float = 0.0
    scheduler_s: float = 0.0
    held: list[int] = field(default_factory=list)
    moved: int = 0
    parked: int = 0
    preemptions: int = 0
    computed_again: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens a second."""
        return self.tokens / self.seconds

    @property
    def mean_batch(self) -> float:
        """Requests that held memory, in the mean over iterations."""
        return float(np.mean(self.held))


class _Pipeline(VirtualPipeline):
    """Stages that count and time what their caches do."""

    def __init__(
        self, times: Sequence[ModelledTimes], clock: VirtualClock, rows: Rows, costs: CacheCosts
    ) -> None:
        super().__init__(times, clock, self._answer)
        self._answers = rows.answers.tolist()
        self._costs = costs
        self.moved = self.parked = 0

    def _answer(self, admission: Admission) -> int:
        return int(self._answers[int(admission.custom_id)])

    def beside_s(self, batch: MicroBatch) -> float:
        moved = sum(move.tokens for move in batch.moves)
        parked = sum(each.tokens for each in (*batch.parks, *batch.restores))
        self.moved += moved
        self.parked += parked
        return moved * self._costs.move_s + parked * self._costs.park_s


class _Timed:
    """A scheduler whose own seconds are counted."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.seconds = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self.scheduler, name)

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        began_s = time.thread_time()
        try:
            return self.scheduler.next_batch()
        finally:
            self.seconds += time.thread_time() - began_s

    def complete(self, batch: MicroBatch, sampled: Sampled) -> object:
        began_s = time.thread_time()
        try:
            return self.scheduler.complete(batch, sampled)
        finally:
            self.seconds += time.thread_time() - began_s


def requests_of(rows: Rows, expected: IntArray | None) -> list[Request]:
    """A request for each row, whose answer may have all of the limit; `expected` [rows]."""
    sampling = Sampling()
    return [
        Request(
            str(number),
            (1,) * prompt,
            rows.limit,
            sampling,
            expected_tokens=None if expected is None else int(expected[number]),
        )
        for number, prompt in enumerate(rows.prompts.tolist())
    ]


def run_job(
    scheduler: Scheduler,
    times: Sequence[ModelledTimes],
    rows: Rows,
    expected: IntArray | None,
    costs: CacheCosts,
) -> JobRun:
    """Run all `rows` to their end; RuntimeError where not all of them end as they should."""
    clock = VirtualClock()
    timed = _Timed(scheduler)
    pipeline = _Pipeline(times, clock, rows, costs)
    driver = PipelineDriver(timed, pipeline)  # type: ignore[arg-type]  # delegates the others
    requests = requests_of(rows, expected)
    run = JobRun(int(rows.answers.sum()))
    given, ended = 0, 0
    while given < len(requests) or scheduler.waiting or scheduler.in_slots:
        while scheduler.wants_requests and given < len(requests):
            part = requests[given : given + AT_ONCE]
            given += len(part)
            driver.add(part, last=given == len(requests))
        if driver.submit_next() is not None:
            run.held.append(scheduler.in_slots)
            continue
        for finished in driver.take_back()[2]:
            ended += 1
            if len(finished.token_ids) != rows.answers[int(finished.custom_id)]:
                raise RuntimeError(f"row {finished.custom_id} ended early, or late")
    if ended != len(rows):
        raise RuntimeError(f"{ended} of {len(rows)} rows have ended")
    run.seconds, run.scheduler_s = clock.now_s, timed.seconds
    run.moved, run.parked = pipeline.moved, pipeline.parked
    run.preemptions, run.computed_again = _preempted(scheduler)
    return run


def _preempted(scheduler: Scheduler) -> tuple[int, int]:
    """How often a request was preempted, and the tokens that were computed again."""
    if isinstance(scheduler, OnDemandScheduler):
        return scheduler.preemptions, scheduler.computed_again
    if isinstance(scheduler, S3Scheduler):
        return scheduler.supervision.preemptions, scheduler.supervision.recomputed_tokens
    return 0, 0
