"""The fleet: the plans of pipelines that share the rows of one job, as one file."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from planner.plan.file import Kind, Saved
from planner.plan.parts import STRICT, JobForecast, Positive, Seconds
from planner.plan.spec import PlanSpec
from quant.common.errors import SpecError


@dataclass(frozen=True, config=STRICT)
class FleetRecord:
    """How the fleet was found: `priced` make-ups in `seconds`, `gap` from the best choice among
    them; no division of the cluster exceeds `ceiling_tokens_per_s`.
    """

    seconds: Seconds
    priced: int
    gap: Seconds
    ceiling_tokens_per_s: Positive


@dataclass(frozen=True, config=STRICT)
class FleetSpec(Saved):
    """Pipelines that share the rows of a job; latency and rate are of all, by simulation."""

    FILE_KIND: ClassVar[Kind] = "fleet"

    version: int
    cluster: str
    replicas: Annotated[tuple[PlanSpec, ...], Field(min_length=1)]
    unused_devices: tuple[str, ...]
    latency_s: Positive
    tokens_per_s: Positive
    record: FleetRecord

    def check(self, source: str = "fleet") -> None:
        first = self.replicas[0]
        for index, plan in enumerate(self.replicas):
            where = f"{source}: field replicas.{index}"
            plan.check(where)
            if plan.model != first.model:
                raise SpecError(
                    f"{where}.model: {plan.model.name} where the others have {first.model.name}; "
                    "plan again"
                )
        names = Counter(name for plan in self.replicas for name in plan_devices(plan))
        if twice := [name for name, count in names.items() if count > 1]:
            raise SpecError(
                f"{source}: field replicas: {twice[0]} is in {names[twice[0]]} pipelines; plan "
                "again"
            )

    @property
    def in_flight(self) -> int:
        return sum(plan.workload.global_batch for plan in self.replicas)

    def make_ups(self) -> dict[str, list[PlanSpec]]:
        found: dict[str, list[PlanSpec]] = {}
        for plan in self.replicas:
            found.setdefault(make_up_text(plan), []).append(plan)
        return found


def plan_devices(plan: PlanSpec) -> tuple[str, ...]:
    return tuple(name for stage in plan.stages for name in stage.device_names)


def make_up_text(plan: PlanSpec) -> str:
    kinds = Counter((stage.accelerator, stage.degree) for stage in plan.stages)
    return " + ".join(
        f"{count} {name}" if degree == 1 else f"{count}x{degree} {name}"
        for (name, degree), count in kinds.items()
    )


Runnable = PlanSpec | FleetSpec
"""What a run can be made of: one pipeline's plan, or those of several that share its rows."""


def named_plans(spec: Runnable, source: str = "the plan") -> dict[str, PlanSpec]:
    """The plans of all pipelines by where they stand in the file `source`."""
    if isinstance(spec, PlanSpec):
        return {source: spec}
    return {f"{source}: field replicas.{i}": plan for i, plan in enumerate(spec.replicas)}


def plans_of(spec: Runnable) -> tuple[PlanSpec, ...]:
    return tuple(named_plans(spec).values())


def shown_plan(spec: Runnable) -> PlanSpec:
    """The plan, or one with the stages and the forecast of a whole fleet: to be watched and shown,
    not to be run, as layers come several times.

    What all pipelines have in common, such as the lengths that they have room for, is that of it.
    """
    if isinstance(spec, PlanSpec):
        return spec
    first = spec.replicas[0]
    stages = [stage for plan in spec.replicas for stage in plan.stages]
    predicted = replace(
        first.predicted,
        latency_s=spec.latency_s,
        tokens_per_s=spec.tokens_per_s,
        busy_share=tuple(share for plan in spec.replicas for share in plan.predicted.busy_share),
    )
    return replace(
        first,
        stages=tuple(replace(stage, index=number) for number, stage in enumerate(stages)),
        predicted=predicted,
        workload=replace(first.workload, global_batch=spec.in_flight, n_slots=None),
        origin=None,
        baselines=(),  # they stand beside one pipeline
        job=None if first.job is None else _job_of(spec, first.job),
    )


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
