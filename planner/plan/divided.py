"""Plans whose schedule divides the phases: some stages prefill, and others decode."""

from __future__ import annotations

from dataclasses import replace

from planner.plan.spec import PlanSpec, StagePlan


def parts_of(plan: PlanSpec) -> tuple[PlanSpec, ...]:
    """The plans of stages that prefill and that decode, or `plan`; both have the origin of the
    whole.
    """
    prefills = plan.prefill_plan
    return (plan,) if prefills is None else (replace(prefills, origin=plan.origin), plan)


def all_stages(plan: PlanSpec) -> tuple[StagePlan, ...]:
    stages = [stage for part in parts_of(plan) for stage in part.stages]
    return tuple(replace(stage, index=number) for number, stage in enumerate(stages))


def undivided(plan: PlanSpec) -> PlanSpec:
    """Make one plan of all stages, to show and not to run: layers come twice."""
    prefills = plan.prefill_plan
    if prefills is None:
        return plan
    predicted = replace(
        plan.predicted,
        busy_share=prefills.predicted.busy_share + plan.predicted.busy_share,
        prefill_bottleneck=prefills.predicted.prefill_bottleneck,
        decode_bottleneck=len(prefills.stages) + plan.predicted.decode_bottleneck,
    )
    return replace(plan, stages=all_stages(plan), predicted=predicted, prefill_plan=None)
