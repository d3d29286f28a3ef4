"""What a plan tells one of its stages, for actors and for stages in one process alike."""

from __future__ import annotations

from actors.stage.spec import StageSpec
from planner.cluster.accelerators import find_accelerator
from planner.plan.spec import PlanSpec, StagePlan


def stage_spec(plan: PlanSpec, stage: StagePlan) -> StageSpec:
    """What the actor of `stage` is told."""
    on_host = stage.emulated or find_accelerator(stage.accelerator).compute_capability is None
    return StageSpec(
        index=stage.index,
        stages=len(plan.stages),
        layers=stage.layers,
        bitwidths=stage.bitwidths,
        dtype=stage.dtype,
        slots=plan.workload.global_batch,
        max_tokens=plan.workload.total_length,
        backends=dict(stage.backends),
        memory_limit_bytes=stage.memory_limit_bytes,
        device_name=stage.device,
        accelerator=None if on_host else stage.accelerator,
        head_on_first=plan.head_on_first,
        rounding=plan.rounding,
        kv_bits=plan.kv_bits,
    )
