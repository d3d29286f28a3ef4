"""Driving a scheduler until its requests have ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actors.messages import Finished, Request
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
