"""Simulating one global batch of a plan by the seconds in its file alone, without a cost model."""

from __future__ import annotations

import numpy as np

from planner.costs.pass_times import PassSeconds
from planner.plan.spec import PlanSpec, StagePlan
from planner.schedule.orca import MixedPass
from planner.schedule.policy_sizes import policy_sizes
from planner.schedule.static import JobRows, Pass
from planner.scheduling import Phase
from planner.simulation.simulation import Simulated, simulate
from planner.workload import Job

FILLS_SHOWN = 3

APPROXIMATION = (
    "times of the plan's micro-batches: prefills in proportion to their tokens, every decode step "
    "as at the mean context"
)


def planned_s(plan: PlanSpec, stage: StagePlan, phase: Phase) -> float:
    """Seconds of a full micro-batch; 0 on emulated devices without a time scale."""
    seconds = stage.prefill_s if phase == "prefill" else stage.decode_s
    return seconds * plan.time_scale if stage.emulated else seconds


def simulate_plan(plan: PlanSpec) -> Simulated:
    """Simulate a batch, or the first `FILLS_SHOWN` fills of a job's slots or requests in flight, at
    the run's `time_scale`. Each pass takes its modelled time, else see `APPROXIMATION`.
    """
    scale = time_scale(plan)
    sizes = policy_sizes(plan.policy, plan.workload, plan.micro_batches)

    def seconds(each: Pass) -> PassSeconds:
        compute, transfer = zip(
            *(_seconds(plan, stage, each) for stage in plan.stages), strict=True
        )
        return PassSeconds(
            tuple(scale * own_s for own_s in compute), tuple(scale * hop_s for hop_s in transfer)
        )

    rows = _shown_rows(plan)
    return simulate(plan.workload, sizes, len(plan.stages), seconds, rows)


def _shown_rows(plan: PlanSpec) -> JobRows | None:
    schedule, slots = plan.policy.schedule, plan.workload.global_batch
    if schedule is not None:
        slots = schedule.decode_requests
    if plan.job is not None:
        return first_rows(plan.job.job, slots)
    if schedule is None or plan.latency is None:
        return None
    generator, lengths = np.random.default_rng(0), plan.latency.lengths
    prompts, outputs = (
        each.drawn(FILLS_SHOWN * slots, generator).tolist()
        for each in (lengths.prompts, lengths.outputs)
    )
    return JobRows(prompts, outputs)


def first_rows(job: Job | None, slots: int) -> JobRows | None:
    if job is None:
        return None
    count = min(job.prompts, FILLS_SHOWN * slots)
    return JobRows.of(job, count)


def is_approximate(plan: PlanSpec) -> bool:
    return any(stage.modelled is None for stage in plan.stages)


def _seconds(plan: PlanSpec, stage: StagePlan, each: Pass) -> tuple[float, float]:
    if isinstance(each, MixedPass):
        return _mixed_seconds(plan, stage, each)
    is_decode = each.phase == "decode"
    if stage.modelled is not None:
        length = each.context_length if is_decode else each.tokens
        lengths = np.array(each.prompts or (length,) * each.requests, dtype=np.int64)
        hop_s = stage.modelled.transfer_s(each.all_tokens, each.requests)
        return stage.modelled.compute_s(is_decode, lengths), hop_s
    if is_decode:
        return stage.decode_s, stage.decode_comm_s
    share = each.all_tokens / _prefill_tokens(plan)
    return share * stage.prefill_s, share * stage.prefill_comm_s


def _mixed_seconds(plan: PlanSpec, stage: StagePlan, each: MixedPass) -> tuple[float, float]:
    """Seconds of a pass of both phases: of modelled times all, else the sum of both."""
    prompt_tokens = each.all_tokens - each.decodes
    if stage.modelled is not None:
        steps = ((each.decode_context, 1),) * each.decodes
        starts, counts = np.array((*steps, *each.parts), dtype=np.int64).T
        hop_s = stage.modelled.transfer_s(each.all_tokens, each.requests)
        return stage.modelled.pass_s(starts, counts), hop_s
    share = prompt_tokens / _prefill_tokens(plan)
    has_steps = min(1, each.decodes)
    compute_s = share * stage.prefill_s + has_steps * stage.decode_s
    return compute_s, share * stage.prefill_comm_s + has_steps * stage.decode_comm_s


def _prefill_tokens(plan: PlanSpec) -> float:
    if plan.job is None:
        return plan.micro_batches.prefill * plan.workload.prompt_length
    return plan.job.passes.prefill_requests * plan.job.job.lengths.mean_prompt


def time_scale(plan: PlanSpec) -> float:
    emulated = all(stage.emulated for stage in plan.stages)
    return plan.time_scale if emulated and plan.time_scale else 1.0
