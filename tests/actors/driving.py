"""Driving a scheduler until its requests have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from actors.messages import Finished, MicroBatch, Request
from actors.schedule.driver import Pipeline, PipelineDriver
from actors.schedule.scheduler import Scheduler


def drive(scheduler: Scheduler, pipeline: Pipeline) -> Iterator[tuple[Finished, ...]]:
    """Run a scheduler that has all of its requests; yields those that end."""
    return run_dry(PipelineDriver(scheduler, pipeline))


def run_dry(
    driver: PipelineDriver, coming: Sequence[Request] = (), chunk: int = 1
) -> Iterator[tuple[Finished, ...]]:
    """Run until nothing is left, with the requests that are `coming` by chunks, whenever more are
    wanted; yields those that end.
    """
    left = list(coming)
    while True:
        if left and driver.wants_requests:
            driver.add(left[:chunk])
            del left[:chunk]
        elif driver.submit_next() is None:
            if not driver.under_way:
                return
            yield driver.take_back()[2]


def served(scheduler: Scheduler, case: Any, pipeline: Pipeline) -> Iterator[Finished]:
    """Ask for a micro-batch whenever one may be under way; wait for the oldest or an arrival of the
    `case`, which tells when requests arrive and how long its workers take.
    """
    coming = deque(zip(case.arrivals_s, case.requests, strict=True))
    under_way: deque[tuple[float, MicroBatch]] = deque()
    free_s, now_s = [0.0] * case.stages, 0.0
    while coming or scheduler.waiting or scheduler.in_slots:
        while coming and coming[0][0] <= now_s:
            scheduler.add([coming.popleft()[1]])
        room = len(under_way) < scheduler.most_under_way
        following = scheduler.next_batch() if room else None
        if following is not None:
            back_s = now_s
            for worker in range(case.stages):
                back_s = max(back_s, free_s[worker]) + case.seconds(worker, len(following[1]))
                free_s[worker] = back_s
            under_way.append((back_s, pipeline.submit(*following)))
        elif under_way and not (room and coming and coming[0][0] < under_way[0][0]):
            back_s, batch = under_way.popleft()
            now_s = max(now_s, back_s)
            yield from scheduler.complete(batch, pipeline.result(batch))
        else:
            now_s = coming[0][0]
