"""Latency against quality: plans that no other one beats in both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmpq.report.elements import Cell, Table
from llmpq.report.formatting import change, number, seconds
from llmpq.report.front_chart import Chart, PlanPoint
from planner.explanation.explain import Explanation
from planner.plan.plan import Plan
from planner.search.front import FrontPoint


@dataclass(frozen=True)
class FrontSection:
    """Undominated plans; `chart` is None where there is one alone."""

    note: str
    chart: Chart | None
    table: Table


def front_section(
    plan: Plan, explanation: Explanation | None, front: Sequence[FrontPoint]
) -> FrontSection | None:
    """The given front, else what other thetas gave; None where neither is known."""
    present = PlanPoint(plan.solver.theta, plan.predicted.latency_s, plan.solver.sensitivity)
    others = [PlanPoint(each.theta, each.latency_s, each.omega) for each in front]
    if not others and explanation is not None:
        others = [
            PlanPoint(answer.theta, answer.predicted_s, answer.sensitivity)
            for answer in explanation.answers.of("theta")
        ]
    if not others:
        return None
    points = _undominated([present, *others])
    heads = ["plan", "theta", "batch", "against this plan", "sensitivity"]
    rows = [_row(point, present) for point in points]
    table = Table("Plans that no other one beats in both", heads, rows)
    if len(points) == 1:
        thetas = sorted({point.theta for point in (present, *others)})
        note = (
            f"Theta from {number(thetas[0])} to {number(thetas[-1])} gives no plan that is better "
            "in one and not worse in the other: quality and speed do not compete here."
        )
        return FrontSection(note, None, table)
    note = (
        "Every point is the best plan for another theta, by the closed form that plans are ranked "
        "by; its seconds are simulated. The large one is this plan. Left is faster, down is better "
        "quality."
    )
    return FrontSection(note, Chart(points, present), table)


def _row(point: PlanPoint, present: PlanPoint) -> list[Cell | str]:
    return [
        Cell("this plan", "strong") if point == present else "other theta",
        number(point.theta),
        seconds(point.latency_s),
        change(point.latency_s - present.latency_s),
        number(point.sensitivity),
    ]


def _undominated(points: Iterable[PlanPoint]) -> list[PlanPoint]:
    """From the fastest on; of equals the first one given."""
    kept: list[PlanPoint] = []
    for point in sorted(points, key=lambda each: (each.latency_s, each.sensitivity)):
        if not kept or point.sensitivity < kept[-1].sensitivity:
            kept.append(point)
    return kept
