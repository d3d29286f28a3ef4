"""The page as a whole: one file, with its style inside and nothing to load."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from llmpq.report.comparison import baselines, what_binds, what_if
from llmpq.report.layers import layers, why
from llmpq.report.markup import Html, tag
from llmpq.report.overview import overview, pipeline
from llmpq.report.pareto import pareto
from llmpq.report.provenance import provenance
from llmpq.report.resources import memory, schedule, times
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
    title = f"{plan.model.name} on {plan.cluster}: plan of llmpq"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(_style())),
    )
    sections = [
        pipeline(plan, explanation),
        layers(plan, explanation),
        why(plan, explanation),
        memory(plan),
        times(plan),
        schedule(plan, explanation),
        what_binds(plan, explanation),
        what_if(plan, explanation),
        baselines(plan),
        pareto(plan, explanation, front),
        provenance(plan),
    ]
    body = tag("body", overview(plan, explanation), tag("main", *sections))
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en").text + "\n"


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


def _style() -> str:
    return files("llmpq.report").joinpath("style.css").read_text(encoding="utf-8")
