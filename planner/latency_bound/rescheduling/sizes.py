"""The sizes that stages which run have been given: no schedule may have more."""

from __future__ import annotations

from dataclasses import dataclass

from planner.latency_bound.placing.job import most_in_group
from planner.plan.divided import parts_of
from planner.plan.parking import host_tokens
from planner.plan.spec import PlanSpec
from planner.schedule.prefills import WAITING
from planner.scheduling import RequestSchedule

SAMPLING_ERROR = 0.03
"""By which the mean prompt of a few hundred rows may be off. Where token slots are short, turns are
smaller; a tenth of them is in use only while groups are larger than in the mean."""

MOVING = 1
"""Turns whose keys and values are on their way from stages that prefill to stages that decode."""


@dataclass(frozen=True)
class RunningSizes:
    """The sizes of stages: the most requests in flight and in one decode micro-batch, the token
    slots that requests may reserve, the requests of a prefill micro-batch, and the tokens of
    prompts that have room in host memory, where keys and values are handed over (else 0).
    """

    in_flight: int
    decode_micro_batch: int
    reservable_tokens: int
    prefill_micro_batch: int
    host_tokens: int = 0

    @classmethod
    def of(cls, plan: PlanSpec) -> RunningSizes:
        """The sizes of a plan's stages, which it keeps when its schedule becomes another."""
        now, workload = plan.policy.followed_schedule, plan.workload
        in_flight = max(workload.global_batch, now.most_in_flight)
        in_group = max(plan.micro_batches.decode, most_in_group(now))
        prefills = plan.prefill_plan
        if prefills is None:
            return cls(in_flight, in_group, workload.reservable_tokens, now.prefill_micro_batch)
        host = min(host_tokens(part) for part in parts_of(plan))
        return cls(
            in_flight,
            in_group,
            workload.reservable_tokens,
            prefills.micro_batches.prefill,
            max(host, int(handed_over_tokens(now, len(prefills.stages), now.mean_prompt_tokens))),
        )

    def have_room(self, schedule: RequestSchedule, in_group: int, reserved_tokens: float) -> bool:
        """Whether the requests of a schedule have room where they decode: so many of them in a
        micro-batch, each of which reserves so many token slots in the mean.
        """
        in_flight = schedule.most_in_flight
        if in_flight > self.in_flight or in_group > self.decode_micro_batch:
            return False
        return in_flight * reserved_tokens <= (1 + SAMPLING_ERROR) * self.reservable_tokens


def handed_over_tokens(schedule: RequestSchedule, stages: int, mean_prompt: float) -> float:
    """Tokens of the prompts in host memory, or soon there: of a turn for each of the `stages` that
    prefill, of those that wait, and of those on their way.
    """
    return (stages + WAITING + MOVING) * schedule.prefill_requests * mean_prompt
