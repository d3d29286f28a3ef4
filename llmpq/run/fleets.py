"""A fleet as runs take it: its plans, a plan that stands for all, what it cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from planner.fleet.fleet_spec import FleetSpec, joined_plan
from planner.plan.parts import JobForecast
from planner.plan.spec import PlanSpec, StagePlan, parts_of
from quant.common.errors import SpecError
from quant.scheme import GPTQ

if TYPE_CHECKING:
    from llmpq.run.options import RunOptions

Runnable = PlanSpec | FleetSpec
"""What a run can be made of: one pipeline's plan, or those of several that share its rows."""

_COMMUTING = 2
"""Ranks whose sum is the same in any order."""


def named_plans(spec: Runnable, source: str = "the plan") -> dict[str, PlanSpec]:
    """The plans of all pipelines by where they stand in the file `source`."""
    if isinstance(spec, PlanSpec):
        return {source: spec}
    return {f"{source}: field replicas.{i}": plan for i, plan in enumerate(spec.replicas)}


def plans_of(spec: Runnable) -> tuple[PlanSpec, ...]:
    return tuple(named_plans(spec).values())


def shown_plan(spec: Runnable) -> PlanSpec:
    """The plan, or one with the stages and the forecast of a whole fleet: to be watched and shown.

    What all pipelines have in common, such as the lengths that they have room for, is that of it.
    """
    if isinstance(spec, PlanSpec):
        return spec
    joined = replace(joined_plan(spec), baselines=())  # they stand beside one pipeline
    return joined if joined.job is None else replace(joined, job=_job_of(spec, joined.job))


def _job_of(fleet: FleetSpec, one: JobForecast) -> JobForecast:
    """The forecast of the job that all pipelines do together, of which `one` does a part."""
    tokens = fleet.tokens_per_s * fleet.latency_s
    prompts = max(1, round(tokens / one.job.lengths.mean_output))
    return replace(
        one,
        job=replace(one.job, prompts=prompts),
        seconds=fleet.latency_s,
        tokens_per_s=fleet.tokens_per_s,
    )


def check_fleet(spec: Runnable, options: RunOptions, source: str) -> None:
    """Raise `SpecError` for what several pipelines, of a fleet or of a plan whose stages do one
    phase each, cannot be run with, and for stages that cannot be deterministic where that is asked;
    any other plan passes.
    """
    pipelines = parts_of(spec) if isinstance(spec, PlanSpec) else spec.replicas
    if options.deterministic:
        _check_deterministic(pipelines, source)
    if isinstance(spec, PlanSpec) and len(pipelines) == 1:
        return
    kind = "a plan of stages that only decode" if isinstance(spec, PlanSpec) else "a fleet"
    if options.replan == "auto" and isinstance(spec, FleetSpec):
        again = "its pipelines are started again, but not planned again"
        raise SpecError(f"replan auto has no effect with {kind} ({source}): {again}; leave it out")
    if options.trace is not None:
        one = "it is of one pipeline"
        raise SpecError(f"trace has no effect with {kind} ({source}): {one}; leave it out")
    if isinstance(spec, FleetSpec):
        check_rooms(spec, source)
    bits = {tuple(b for stage in plan.stages for b in stage.bitwidths) for plan in pipelines}
    if len(bits) > 1 and any(plan.rounding == GPTQ for plan in pipelines):
        raise SpecError(
            f"{source}: its pipelines have different bits, and rounding {GPTQ} calibrates one "
            "checkpoint for all; plan with another --rounding"
        )


def _check_deterministic(pipelines: Sequence[PlanSpec], source: str) -> None:
    """Raise `SpecError` where a row's tokens would depend on the others all the same."""
    for stage in (stage for plan in pipelines for stage in plan.stages if not stage.emulated):
        if not stage.kind.is_cpu:
            why = "kernels of GPUs are chosen by what is computed together"
        elif stage.degree > _COMMUTING:
            why = "sums of more than two ranks are taken in an order that depends on the place"
        else:
            continue
        raise SpecError(
            f"{source}: stage {stage.index} ({stage.label}) cannot be deterministic: {why}; leave "
            "out deterministic, or plan for CPUs that are not divided"
        )
    forms = {
        (plan.kv_bits, plan.rounding, tuple(_form(s, b) for s in plan.stages for b in s.bitwidths))
        for plan in pipelines
    }
    if len(forms) > 1:
        raise SpecError(
            f"{source}: its pipelines hold layers in different bits, types or kernels, so that "
            "tokens depend on which of them computes a row; leave out deterministic"
        )


def _form(stage: StagePlan, bits: int) -> tuple[int, str, str | None]:
    return bits, stage.dtype, stage.backends.get(bits)


def check_rooms(fleet: FleetSpec, source: str) -> None:
    """Raise `SpecError` unless every pipeline has room for the same rows, and is one."""
    rooms = [
        (each.workload.prompt_length, each.workload.new_tokens, each.workload.total_length)
        for each in fleet.replicas
    ]
    for index, room in enumerate(rooms):
        if fleet.replicas[index].prefill_plan is not None:
            raise SpecError(
                f"{source}: field replicas.{index}.prefill_plan: pipelines of a fleet have stages "
                "that do both phases; run that plan alone"
            )
        if room != rooms[0]:
            raise SpecError(
                f"{source}: field replicas.{index}.workload: room for {room[0]} prompt and "
                f"{room[1]} new tokens, {room[2]} in all, where the first pipeline has "
                f"{rooms[0][0]}, {rooms[0][1]} and {rooms[0][2]}; plan again"
            )
