"""The page as a whole: one file, with its style inside and nothing to load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmpq.report.rendering import render
from llmpq.report.sections.comparison import baselines, what_binds, what_if
from llmpq.report.sections.front import front_section
from llmpq.report.sections.layers import layers, reasons
from llmpq.report.sections.overview import overview, pipeline
from llmpq.report.sections.provenance import provenance
from llmpq.report.sections.resources import memory, schedule, times
from planner.explanation.explain import Explanation
from planner.plan.plan import Plan
from planner.search.front import FrontPoint
from quant.common.errors import InputError
from quant.common.whole_file import write_whole


def report_page(
    plan: Plan, explanation: Explanation | None = None, front: Sequence[FrontPoint] = ()
) -> str:
    """The plan as an HTML document.

    Without an `explanation` (a plan that was read from its file) the reasons and the schedule are
    missing, and the page says so. `front`: as `planner.search.front.trace_front` finds it; by
    default the plans for other thetas of the explanation.
    """
    return render(
        "page.html.j2",
        plan=plan,
        overview=overview(plan, explanation),
        pipeline=pipeline(plan, explanation),
        layers=layers(plan, explanation),
        reasons=explanation and reasons(plan, explanation),
        memory=memory(plan),
        times=times(plan),
        pictures=schedule(plan, explanation) if explanation else (),
        binds=explanation and what_binds(plan, explanation),
        what_if=explanation and what_if(plan, explanation),
        baselines=baselines(plan),
        front=front_section(plan, explanation, front),
        provenance=provenance(plan),
    )


def write_report(
    path: str | Path,
    plan: Plan,
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
