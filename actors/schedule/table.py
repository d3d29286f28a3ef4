"""The table of scheduling policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actors.schedule.scheduler import QueueSizes, Scheduler
from actors.schedule.static import StaticScheduler

POLICIES: Mapping[str, Callable[[QueueSizes, int], Scheduler]] = {"static": StaticScheduler}
"""Makes the scheduler of each policy for a queue of these sizes and a number of stages."""


def make_scheduler(sizes: QueueSizes, stages: int) -> Scheduler:
    """A scheduler with an empty queue, for a pipeline of `stages`."""
    return POLICIES[sizes.policy](sizes, stages)
