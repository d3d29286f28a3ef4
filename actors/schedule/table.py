"""The table of scheduling policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from actors.schedule.exegpt import RraScheduler, exegpt_sizes
from actors.schedule.exegpt_decode import DecodeScheduler, decode_sizes
from actors.schedule.orca import OrcaScheduler, orca_sizes
from actors.schedule.s3 import S3Scheduler, s3_sizes
from actors.schedule.scheduler import QueueSizes, Scheduler
from actors.schedule.static import StaticScheduler, static_sizes
from planner.plan.spec import PlanSpec
from planner.scheduling import PolicyName, PolicyOptions


class Policy(NamedTuple):
    """A policy: `scheduler` makes one for a queue of these sizes and a number of stages; `sizes`
    are those that it wants for a plan and its options.
    """

    scheduler: Callable[[QueueSizes, int], Scheduler]
    sizes: Callable[[PlanSpec, PolicyOptions], QueueSizes]


def _bounded_scheduler(sizes: QueueSizes, stages: int) -> Scheduler:
    """That of stages which do both phases in turns, or only decode."""
    divides = sizes.schedule is not None and sizes.schedule.divides
    return (DecodeScheduler if divides else RraScheduler)(sizes, stages)


def _bounded_sizes(plan: PlanSpec, options: PolicyOptions) -> QueueSizes:
    divides = options.schedule is not None and options.schedule.divides
    return (decode_sizes if divides else exegpt_sizes)(plan, options)


POLICIES: Mapping[PolicyName, Policy] = {
    "static": Policy(StaticScheduler, lambda plan, _: static_sizes(plan)),
    "orca": Policy(OrcaScheduler, orca_sizes),
    "s3": Policy(S3Scheduler, s3_sizes),
    "exegpt": Policy(_bounded_scheduler, _bounded_sizes),
}


def make_scheduler(sizes: QueueSizes, stages: int) -> Scheduler:
    """A scheduler with an empty queue, for a pipeline of `stages`."""
    return POLICIES[sizes.policy].scheduler(sizes, stages)


def queue_sizes(plan: PlanSpec, options: PolicyOptions) -> QueueSizes:
    """The sizes of the queue for `plan` under a policy."""
    return POLICIES[options.name].sizes(plan, options)
