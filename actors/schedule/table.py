"""The table of scheduling policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from actors.schedule.orca import OrcaScheduler, orca_sizes
from actors.schedule.scheduler import QueueSizes, Scheduler
from actors.schedule.static import StaticScheduler
from planner.plan.spec import PlanSpec
from quant.common.errors import SpecError


class Policy(NamedTuple):
    """A policy: `scheduler` makes one for a queue of these sizes and a number of stages; `sizes`
    are those that it wants for a plan.
    """

    scheduler: Callable[[QueueSizes, int], Scheduler]
    sizes: Callable[[PlanSpec], QueueSizes]


POLICIES: Mapping[str, Policy] = {
    "static": Policy(StaticScheduler, QueueSizes.of),
    "orca": Policy(OrcaScheduler, orca_sizes),
}


def make_scheduler(sizes: QueueSizes, stages: int) -> Scheduler:
    """A scheduler with an empty queue, for a pipeline of `stages`."""
    return _policy(sizes.policy).scheduler(sizes, stages)


def queue_sizes(plan: PlanSpec, policy: str) -> QueueSizes:
    """The sizes of the queue for `plan` under this policy."""
    return _policy(policy).sizes(plan)


def _policy(name: str) -> Policy:
    """The policy of this name; raises SpecError where there is none."""
    if name not in POLICIES:
        raise SpecError(f"there is no policy {name!r:.80}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name]
