"""Texts that try to be more than text, and plans that hold them."""

from __future__ import annotations

from dataclasses import replace

from planner.plan.parts import DivergenceScale, JobForecast
from planner.plan.spec import PlanSpec

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202e"
HOSTILE_TEXTS = ("<script>alert(1)</script>", "\"onload='x'", "[bold red]x[/]", "a&b;\x1b[31mred")


def with_texts(plan: PlanSpec, text: str) -> PlanSpec:
    """The plan with `text` wherever people may write what they like."""
    stages = tuple(
        replace(each, device=f"{text}{each.index}", accelerator=text, node=text, provenance=text)
        for each in plan.stages
    )
    model = replace(plan.model, source=text, name=text, model_type=text)
    baselines = tuple(replace(each, name=text) for each in plan.baselines)
    solver = replace(plan.solver, objective_kind=text, method=text, solver=text, status=text)
    return replace(
        plan,
        model=model,
        cluster=text,
        stages=stages,
        baselines=baselines,
        solver=solver,
        sensitivity_source=text,
        quality=plan.quality and replace(plan.quality, scale=_of_text(plan.quality.scale, text)),
        unused_devices=(f"{text}-unused",),
        job=None if plan.job is None else _with_text(plan.job, text),
        beside=replace(
            plan.beside,
            more_devices=tuple(
                replace(each, accelerator=text, node=text) for each in plan.beside.more_devices
            ),
        ),
    )


def _of_text(scale: DivergenceScale, text: str) -> DivergenceScale:
    return replace(scale, basis="no unit", source=text)


def _with_text(job: JobForecast, text: str) -> JobForecast:
    lengths = replace(job.job.lengths, outputs_from=text)
    return replace(job, job=replace(job.job, lengths=lengths))
