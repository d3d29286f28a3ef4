"""The page as a whole: one file, with its style inside and nothing to load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmpq.report import figures
from llmpq.report.answers.answer import Answer
from llmpq.report.answers.making import Making, making
from llmpq.report.answers.menu import Course, menu
from llmpq.report.answers.verdict import Verdict, verdict
from llmpq.report.bounded_page import bounded_page
from llmpq.report.figures import Facts, facts_of
from llmpq.report.formatting import rate, seconds
from llmpq.report.job_answers import job_answers, job_remarks
from llmpq.report.pictures.curve import JobCurve, curve_of
from llmpq.report.pictures.front import Chart, Front, front_of
from llmpq.report.pictures.schedule import Picture, schedule_pictures
from llmpq.report.pictures.writing import write_page
from llmpq.report.reasons.kernels import KernelReason, kernel_reasons
from llmpq.report.reasons.layer_reasons import ReasonGroup, reason_groups
from llmpq.report.reasons.what_if import ChangedPlans, changed_plans
from llmpq.report.rendering import render
from llmpq.report.sentences import (
    bottlenecks,
    layer_sentence,
    layer_sentences,
    lever,
    question,
    worth_telling_s,
)
from planner.cluster.spec import grouped_cluster
from planner.explanation.explain import Explanation, StageLimits
from planner.latency_bound.front import KindFronts
from planner.plan.spec import Baseline, PlanSpec
from planner.search.find import FrontPoint
from quant.common.errors import LlmpqError


@dataclass(frozen=True)
class Explained:
    """The part of the page that needs an explanation; `least_s`: accuracy of the search,
    `layer_sentences` by stage.
    """

    least_s: float
    lever: str
    layer_titles: Mapping[int, str]
    reason_groups: Sequence[ReasonGroup]
    layer_sentences: Sequence[Sequence[str]]
    kernels: Sequence[KernelReason]
    pictures: Sequence[Picture]
    limits: Sequence[StageLimits]
    changed: ChangedPlans
    not_asked: Sequence[str]


@dataclass(frozen=True)
class Choices:
    """The plans that can be had, what people ask of them, and their curve."""

    menu: Sequence[Course]
    answers: Sequence[Answer]
    remarks: Sequence[str]
    curve: JobCurve | None


@dataclass(frozen=True)
class Page:
    """All that the templates show, under the names that they use.

    `whole`: what the seconds of the plan are of.
    """

    plan: PlanSpec
    whole: str
    verdict: Verdict
    making: Making
    facts: Facts
    summary: str
    choices: Choices
    link_lines: Sequence[Sequence[str]]
    baselines: Sequence[Baseline]
    explained: Explained | None
    not_explained: str
    front: Front | None
    chart: Chart | None


def report_page(
    plan: PlanSpec,
    reasons: Explanation | LlmpqError | None = None,
    front: Sequence[FrontPoint] | KindFronts = (),
    made: Making | None = None,
) -> str:
    """The plan as an HTML document.

    Without an explanation the reasons and the schedule are missing, and the page says so, with the
    error that says why. `front`: as `planner.search.find.trace_front` finds it; by
    default the plans for other thetas of the explanation. `made`: how the page is made, by default
    now and by the command that the plan's origin tells. Of a plan under a bound on the latency of
    requests it is `bounded_page`.
    """
    if plan.latency is not None:
        return bounded_page(plan, front if isinstance(front, KindFronts) else None, made)
    points = () if isinstance(front, KindFronts) else front
    explanation = reasons if isinstance(reasons, Explanation) else None
    found = front_of(plan, explanation, points)
    page = Page(
        plan=plan,
        whole=figures.whole(plan),
        verdict=verdict(plan),
        making=made or making(plan),
        facts=facts_of(plan),
        summary=bottlenecks(plan),
        choices=Choices(menu(plan), job_answers(plan), job_remarks(plan), curve_of(plan)),
        link_lines=_link_lines(plan, explanation),
        baselines=sorted(plan.baselines, key=lambda each: each.latency_s or math.inf),
        explained=_explained(plan, explanation) if explanation else None,
        not_explained=str(reasons) if isinstance(reasons, LlmpqError) else "",
        front=found,
        chart=Chart(found.points, found.present) if found and len(found.points) > 1 else None,
    )
    return render("plan.html.j2", **vars(page))


def _explained(plan: PlanSpec, explanation: Explanation) -> Explained:
    least_s = max(plan.solver.gap, 1e-4) * plan.solver.objective
    devices = [stage.label for stage in plan.stages]
    answers = explanation.answers
    return Explained(
        least_s=least_s,
        lever=lever(plan, explanation, least_s),
        layer_titles={
            layer: layer_sentence(reason, devices[reason.stage], least_s)
            for reason in explanation.layers
            for layer in reason.layers
        },
        reason_groups=reason_groups(explanation.layers, least_s),
        layer_sentences=[
            layer_sentences(
                [each for each in explanation.layers if each.stage == stage.index], devices, least_s
            )
            for stage in plan.stages
        ],
        kernels=kernel_reasons(plan, explanation.costs),
        pictures=schedule_pictures(explanation.simulated, devices, plan.job is not None),
        limits=explanation.stages,
        changed=changed_plans(answers.given, plan, least_s, worth_telling_s(plan, least_s)),
        not_asked=[question(each, plan.stages) for each in answers.left_out],
    )


def _link_lines(plan: PlanSpec, explanation: Explanation | None) -> list[list[str]]:
    """Seconds of each stage's link to the next one, and its rate where the cluster is known."""
    lines = [
        [f"prefill {seconds(stage.prefill_comm_s)}", f"decode {seconds(stage.decode_comm_s)}"]
        for stage in plan.stages
    ]
    if explanation is not None:
        cluster = explanation.costs.cluster
        path = grouped_cluster(cluster, [stage.device_names for stage in plan.stages]).devices
        for sender, receiver, line in zip(path, [*path[1:], path[0]], lines, strict=True):
            line.insert(0, rate(cluster.link_bytes_per_s(sender, receiver)))
    return lines


def write_report(
    path: str | Path,
    plan: PlanSpec,
    reasons: Explanation | LlmpqError | None = None,
    front: Sequence[FrontPoint] | KindFronts = (),
    made: Making | None = None,
) -> None:
    """Write `report_page`; an existing file is replaced whole or not at all.

    Raises InputError where it cannot be written.
    """
    write_page(Path(path), report_page(plan, reasons, front, made))
