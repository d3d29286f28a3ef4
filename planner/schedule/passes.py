"""The requests of a job and the passes of stages under any policy, and the sizes of its queue, as a
plan states them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.lengths import PlannedHeads
from planner.schedule.turns import Turns
from planner.scheduling import TOKEN_POLICIES, Phase, PolicyName, PolicyOptions, RequestSchedule
from planner.workload import Job, MicroBatches, Workload
from quant.common.errors import SpecError


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass through all stages. `index`: of a prefill by submission, or of the decode group;
    `step`: 0 in prefill, else from 1. Each request adds `tokens` to `context_length` (rounded
    means); `prompts`: lengths of a prefill's unlike prompts. `results_before` results came back
    before.
    """

    phase: Phase
    index: int
    step: int
    requests: int
    tokens: int
    context_length: int
    results_before: int
    prompts: tuple[int, ...] = ()

    @property
    def all_tokens(self) -> int:
        return sum(self.prompts) if self.prompts else self.requests * self.tokens


def computed_tokens(each: Pass, heads: PlannedHeads) -> float:
    """Tokens that a pass of one phase computes."""
    if each.phase == "decode":
        return each.all_tokens
    prompts = each.prompts or (each.tokens,) * each.requests
    return sum(map(heads.computed, prompts))


@dataclass(frozen=True)
class JobRows:
    """Prompt and output tokens of a job's requests [R] in queue order, the most tokens each may
    `reserve` (None: those), and the new tokens a predictor expects (None: the most). Each prompt
    begins with `shared` tokens that are not computed.
    """

    prompts: Sequence[int]
    outputs: Sequence[int]
    reserved: Sequence[int] | None = None
    expected: Sequence[int] | None = None
    shared: int = 0

    @classmethod
    def alike(cls, workload: Workload) -> JobRows:
        rows, shared = workload.global_batch, workload.heads.shared_tokens
        prompts, outputs = [workload.prompt_length] * rows, [workload.new_tokens] * rows
        return cls(prompts, outputs, shared=shared)

    @classmethod
    def of(cls, job: Job, count: int) -> JobRows:
        """So many requests of the job's lengths, with what its predictor expects."""
        prompts, outputs = job.lengths.rows(count)
        reserved = job.lengths.reserved(prompts, outputs)
        expected = None if job.predictor is None else job.predictor.predicted(outputs)
        both, shared = (prompts.tolist(), outputs.tolist()), job.heads.shared_tokens
        return cls(*both, reserved.tolist(), expected, shared)


def reservations(rows: JobRows, n_slots: int) -> list[int]:
    """The token slots that each request may need; SpecError where one needs more than there are."""
    reserved = list(rows.reserved or map(sum, zip(rows.prompts, rows.outputs, strict=True)))
    most = max(reserved, default=0)
    if most > n_slots:
        raise SpecError(
            f"a request needs {most} token slots, but there are {n_slots} in all; give n_slots of "
            "at least that"
        )
    return reserved


def rounded_mean(total: int, count: int) -> int:
    """The mean to the nearest whole number; halves go up."""
    return (2 * total + count) // (2 * count)


def prefill_pass(
    prompts: Sequence[int], requests: range, index: int, results_before: int, unlike: bool
) -> Pass:
    """The prefill of these requests; `unlike`: the prompts of the job have not all one length."""
    first, size = requests.start, len(requests)
    own = tuple(prompts[first : requests.stop]) if unlike else ()
    tokens = rounded_mean(sum(own), size) if own else prompts[first]
    return Pass("prefill", index, 0, size, tokens, 0, results_before, own)


@dataclass(frozen=True)
class OrcaSizes:
    """Sizes as in `actors.schedule.scheduler.QueueSizes`, of a policy of `TOKEN_POLICIES`; 0
    `prefill_chunk_tokens`: prompts are whole; 0 `slots`: one for each that may be under way.
    """

    max_batch_size: int
    n_slots: int
    max_batch_tokens: int = 0
    prefill_chunk_tokens: int = 0
    policy: PolicyName = "orca"
    slots: int = 0


@dataclass(frozen=True)
class TurnSizes:
    """Sizes of `exegpt` as in `QueueSizes` of the runtime, micro-batches in requests."""

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


def policy_sizes(
    policy: PolicyOptions, workload: Workload, sizes: MicroBatches, has_states: bool = False
) -> Sizes:
    """The sizes of `policy` for the KV cache of `workload`; with mixed phases a micro-batch has the
    tokens of the largest prefill and one of each request. Where layers keep states or windows'
    rooms (`has_states`), no more requests are under way than there is memory for. SpecError for
    `exegpt` without its schedule.
    """
    slots = workload.reservable_under(policy.name)
    if policy.name in TOKEN_POLICIES:
        most = policy.max_batch_size or sizes.decode
        tokens = sizes.prefill * workload.prompt_length + most
        bound = workload.global_batch if has_states else 0
        return OrcaSizes(most, slots, tokens, policy.prefill_chunk_tokens, policy.name, bound)
    if policy.name == "static":
        return sizes
    return TurnSizes.of(policy.followed_schedule, slots)
