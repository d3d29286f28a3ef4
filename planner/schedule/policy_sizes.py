"""The sizes of a queue under each policy, as a plan states them."""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedule.turns import Turns
from planner.scheduling import TOKEN_POLICIES, PolicyName, PolicyOptions, RequestSchedule
from planner.workload import MicroBatches, Workload


@dataclass(frozen=True)
class OrcaSizes:
    """Sizes as in `actors.schedule.scheduler.QueueSizes`, of a policy of `TOKEN_POLICIES`; 0
    `prefill_chunk_tokens`: prompts are whole.
    """

    max_batch_size: int
    n_slots: int
    max_batch_tokens: int = 0
    prefill_chunk_tokens: int = 0
    policy: PolicyName = "orca"


@dataclass(frozen=True)
class TurnSizes:
    """Sizes of `exegpt` as in `actors.schedule.scheduler.QueueSizes`, the micro-batches' in
    requests.
    """

    schedule: RequestSchedule
    slots: int
    n_slots: int
    prefill_micro_batch: int
    decode_micro_batch: int

    @classmethod
    def of(cls, schedule: RequestSchedule, n_slots: int) -> TurnSizes:
        """Slots for as many requests as the schedule's tolerance allows, and one turn more."""
        return cls(
            schedule,
            schedule.most_in_flight + schedule.prefill_requests,
            n_slots,
            schedule.prefill_micro_batch,
            Turns.of(schedule).most,
        )


Sizes = MicroBatches | OrcaSizes | TurnSizes
"""Those of `static`, of the policies that mix the phases, and of `exegpt`."""


def policy_sizes(policy: PolicyOptions, workload: Workload, sizes: MicroBatches) -> Sizes:
    """The sizes of `policy` for the KV cache of `workload`; with mixed phases a micro-batch has the
    tokens of the largest prefill and one of each request. SpecError for `exegpt` without its
    schedule.
    """
    slots = workload.reservable_tokens
    if policy.name in TOKEN_POLICIES:
        most = policy.max_batch_size or sizes.decode
        tokens = sizes.prefill * workload.prompt_length + most
        return OrcaSizes(most, slots, tokens, policy.prefill_chunk_tokens, policy.name)
    if policy.name == "static":
        return sizes
    return TurnSizes.of(policy.followed_schedule, slots)
