"""Stages that run, as a search for schedules sees them: their layers lie where they are, and no
schedule has room beyond their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from planner.latency_bound.placing.divisions import Division
from planner.latency_bound.placing.job import most_in_group
from planner.latency_bound.placing.placed import Placed
from planner.latency_bound.placing.placement import Placement
from planner.latency_bound.placing.rra import RraPlaced
from planner.latency_bound.placing.waa import WaaPlaced
from planner.latency_bound.request import BoundRequest
from planner.latency_bound.rescheduling.sizes import RunningSizes, handed_over_tokens
from planner.plan.spec import PlanSpec
from planner.scheduling import RequestSchedule
from planner.workload import Job


class RunningStages(Placed, Protocol):
    """Stages that run, and the requests that were measured."""

    @property
    def job(self) -> Job:
        """The job that stands for the requests."""

    @property
    def request(self) -> BoundRequest:
        """The requests, and the bound on their latency."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RunningRra(RraPlaced):
    """Stages of both phases; their prefill micro-batches stay as they are."""

    sizes: RunningSizes

    def has_room(self, schedule: RequestSchedule) -> bool:
        """Whether the stages may follow a schedule as it is."""
        return self._has_room(schedule, self.sizes.prefill_micro_batch)

    def _reservable_tokens(self, schedule: RequestSchedule) -> int:
        return self.sizes.reservable_tokens

    def _turns(self, newcomers: int, groups: int) -> tuple[int, ...]:
        return (self.sizes.prefill_micro_batch,)

    def _has_room(self, schedule: RequestSchedule, prefill_micro_batch: int) -> bool:
        return self.sizes.have_room(schedule, most_in_group(schedule), reserved_tokens(self))


@dataclass(frozen=True, eq=False, kw_only=True)
class RunningWaa(WaaPlaced):
    """Stages that prefill, and stages that decode. Prefill micro-batches may become smaller, and
    groups more than are fastest, where they would have more requests than have room.
    """

    sizes: RunningSizes

    def _of(self, requests: int) -> RequestSchedule:
        fastest = super()._of(requests)
        least = -(-fastest.most_in_flight // self.sizes.decode_micro_batch)
        groups = min(requests, max(least, fastest.decode_micro_batches))
        return replace(fastest, decode_micro_batches=groups)

    def _decodes(self, schedule: RequestSchedule) -> bool:
        return self.sizes.have_room(schedule, most_in_group(schedule), reserved_tokens(self))

    def _prefills(self, schedule: RequestSchedule) -> bool:
        """Whether prompts have room in micro-batches, and in host memory; one at a time has."""
        if schedule.prefill_micro_batch > self.sizes.prefill_micro_batch:
            return False
        stages, mean = len(self.prefill.devices), self.request.lengths.prompts.mean
        tokens = handed_over_tokens(schedule, stages, mean)
        return schedule.prefill_requests == 1 or tokens <= self.sizes.host_tokens


def reserved_tokens(stages: RunningStages) -> float:
    """Token slots that a request reserves in the mean: lengths are drawn apart from each other, and
    every request reserves all new tokens.
    """
    return stages.request.lengths.prompts.mean + stages.job.lengths.longest_output


def running_stages(
    plan: PlanSpec, placements: tuple[Placement, ...], job: Job, request: BoundRequest
) -> RunningStages:
    """The stages of `plan`, whose `placements` are as in `Placed`."""
    sizes, (placement, *prefilling) = RunningSizes.of(plan), placements
    if not prefilling:
        return RunningRra(placement, job, request, sizes=sizes)
    (prefill,) = prefilling
    division = Division(prefill.devices, placement.devices)
    kind = plan.policy.followed_schedule.kind
    return RunningWaa(kind, division, placement, prefill, job, request, sizes=sizes)
