"""The page of a plan under a bound on the latency of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.report.answers.answer import Answer
from llmpq.report.answers.making import Making, making
from llmpq.report.answers.verdict import Verdict, verdict
from llmpq.report.figures import Facts, facts_of, whole
from llmpq.report.formatting import seconds
from llmpq.report.job_answers import job_answers
from llmpq.report.pictures.bounds import BoundCurves, winners
from llmpq.report.pictures.schedule import Picture, cycle_pictures
from llmpq.report.rendering import render
from planner.latency_bound.front import KindFronts
from planner.plan.spec import PlanSpec, StagePlan
from planner.scheduling import PHASES, Phase


@dataclass(frozen=True)
class Part:
    """The stages of one pipeline: their `plan`, a `title` that says what they do, and the phases
    that they compute.
    """

    plan: PlanSpec
    title: str
    phases: tuple[Phase, ...]

    @property
    def link_lines(self) -> list[list[str]]:
        """Seconds of each stage's link to the next one."""
        return [
            [f"{phase} {seconds(_link_s(stage, phase))}" for phase in self.phases]
            for stage in self.plan.stages
        ]


def _link_s(stage: StagePlan, phase: Phase) -> float:
    return stage.prefill_comm_s if phase == "prefill" else stage.decode_comm_s


@dataclass(frozen=True)
class BoundedPage:
    """All that the templates show, under the names that they use."""

    plan: PlanSpec
    whole: str
    verdict: Verdict
    making: Making
    facts: Facts
    answers: Sequence[Answer]
    parts: Sequence[Part]
    pictures: Sequence[Picture]
    curves: BoundCurves | None
    winners: Sequence[str]


def bounded_page(
    plan: PlanSpec, fronts: KindFronts | None = None, made: Making | None = None
) -> str:
    """The plan as an HTML document, with throughput over bounds (`fronts`), where that is known;
    `made` as in `llmpq.report.page.report_page`.
    """
    page = BoundedPage(
        plan=plan,
        whole=whole(plan),
        verdict=verdict(plan),
        making=made or making(plan),
        facts=facts_of(plan),
        answers=job_answers(plan),
        parts=_parts(plan),
        pictures=cycle_pictures(plan),
        curves=None if fronts is None else BoundCurves(fronts, plan.latency),
        winners=[] if fronts is None else winners(fronts),
    )
    return render("bounded.html.j2", **vars(page))


def _parts(plan: PlanSpec) -> list[Part]:
    """The pipelines of a plan: one, or one that prefills and one that decodes."""
    if plan.prefill_plan is None:
        return [Part(plan, "All stages prefill and decode", PHASES)]
    return [
        Part(plan.prefill_plan, "Stages that prefill", ("prefill",)),
        Part(plan, "Stages that decode", ("decode",)),
    ]
