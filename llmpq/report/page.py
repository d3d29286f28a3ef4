"""The page as a whole: one file, with its style inside and nothing to load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from llmpq.report.formatting import rate, seconds
from llmpq.report.front import Chart, front_of
from llmpq.report.layer_reasons import reason_groups
from llmpq.report.rendering import render
from llmpq.report.schedule import schedule_pictures
from llmpq.report.sentences import (
    bottlenecks,
    layer_sentence,
    layer_sentences,
    lever,
    question,
    summary,
)
from llmpq.report.what_if import changed_plans
from planner.explanation.explain import Explanation
from planner.plan.spec import PlanSpec
from planner.search.front import FrontPoint
from quant.common.errors import InputError
from quant.common.whole_file import write_whole


def report_page(
    plan: PlanSpec, explanation: Explanation | None = None, front: Sequence[FrontPoint] = ()
) -> str:
    """The plan as an HTML document.

    Without an `explanation` (a plan that was read from its file) the reasons and the schedule are
    missing, and the page says so. `front`: as `planner.search.front.trace_front` finds it; by
    default the plans for other thetas of the explanation.
    """
    found = front_of(plan, explanation, front)
    return render(
        "page.html.j2",
        plan=plan,
        explanation=explanation,
        summary=[summary(plan), bottlenecks(plan)],
        link_lines=_link_lines(plan, explanation),
        baselines=sorted(plan.baselines, key=lambda each: each.latency_s or math.inf),
        front=found,
        chart=found and Chart(found.points, found.present),
        **(_explained(plan, explanation) if explanation else {}),
    )


def _explained(plan: PlanSpec, explanation: Explanation) -> dict[str, object]:
    """Values that the templates show of an explanation, under the names that they use."""
    least_s = max(plan.solver.gap, 1e-4) * plan.solver.objective
    devices = [stage.device for stage in plan.stages]
    answers = explanation.answers
    return {
        "least_s": least_s,
        "lever": lever(plan, explanation, least_s),
        "layer_titles": {
            layer: layer_sentence(reason, devices[reason.stage], least_s)
            for reason in explanation.layers
            for layer in reason.layers
        },
        "reason_groups": reason_groups(explanation.layers, least_s),
        "layer_sentences": layer_sentences(explanation.layers, devices, least_s),
        "pictures": schedule_pictures(explanation.simulated, devices),
        "changed_plans": changed_plans(answers.given, plan.stages, least_s),
        "not_asked": [question(each, plan.stages) for each in answers.left_out],
    }


def _link_lines(plan: PlanSpec, explanation: Explanation | None) -> list[list[str]]:
    """Seconds of each stage's link to the next one, and its rate where the cluster is known."""
    lines = [
        [f"prefill {seconds(stage.prefill_comm_s)}", f"decode {seconds(stage.decode_comm_s)}"]
        for stage in plan.stages
    ]
    if explanation is not None:
        cluster = explanation.costs.cluster
        devices = {device.name: device for device in cluster.devices}
        path = [devices[stage.device] for stage in plan.stages]
        for sender, receiver, line in zip(path, [*path[1:], path[0]], lines, strict=True):
            line.insert(0, rate(cluster.link_bytes_per_s(sender, receiver)))
    return lines


def write_report(
    path: str | Path,
    plan: PlanSpec,
    explanation: Explanation | None = None,
    front: Sequence[FrontPoint] = (),
) -> None:
    """Write the page; an existing file is replaced whole or not at all.

    Raises InputError where it cannot be written.
    """
    target = Path(path)
    try:
        write_whole(target, report_page(plan, explanation, front))
    except OSError as error:
        raise InputError(f"cannot write the report to {target}: {error.strerror}") from error
