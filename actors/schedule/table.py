"""The table of scheduling policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from actors.schedule.exegpt import RraScheduler, exegpt_sizes
from actors.schedule.exegpt_waa import (
    DecodeScheduler,
    PrefillScheduler,
    decode_sizes,
    prefill_sizes,
)
from actors.schedule.orca import OrcaScheduler, orca_sizes
from actors.schedule.peak import PeakScheduler
from actors.schedule.s3 import S3Scheduler, s3_sizes
from actors.schedule.scheduler import QueueSizes, Scheduler
from actors.schedule.static import StaticScheduler
from planner.plan.kv_copies import head_tokens
from planner.plan.spec import PlanSpec, Role
from planner.scheduling import PolicyName, PolicyOptions


class Policy(NamedTuple):
    """A policy: its `scheduler` of a queue, and the `sizes` that it wants for a plan."""

    scheduler: Callable[[QueueSizes, int], Scheduler]
    sizes: Callable[[PlanSpec, PolicyOptions], QueueSizes]


BOUNDED_POLICIES: Mapping[Role, Policy] = {
    "both": Policy(RraScheduler, exegpt_sizes),
    "prefill": Policy(PrefillScheduler, prefill_sizes),
    "decode": Policy(DecodeScheduler, decode_sizes),
}
"""Those of `exegpt` by the phase that the stages have."""


POLICIES: Mapping[PolicyName, Policy] = {
    "static": Policy(StaticScheduler, lambda plan, _: QueueSizes.of(plan)),
    "orca": Policy(OrcaScheduler, orca_sizes),
    "s3": Policy(PeakScheduler, s3_sizes),
    "s3-published": Policy(S3Scheduler, s3_sizes),
    "exegpt": Policy(
        lambda sizes, stages: BOUNDED_POLICIES[sizes.role].scheduler(sizes, stages),
        lambda plan, options: BOUNDED_POLICIES[plan.stages[0].role].sizes(plan, options),
    ),
}


def make_scheduler(sizes: QueueSizes, stages: int) -> Scheduler:
    return POLICIES[sizes.policy].scheduler(sizes, stages)


def queue_sizes(plan: PlanSpec, options: PolicyOptions, shares_heads: bool = False) -> QueueSizes:
    sizes = POLICIES[options.name].sizes(plan, options)
    return replace(sizes, head_tokens=head_tokens(plan)) if shares_heads else sizes
