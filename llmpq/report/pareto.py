"""Latency against quality: the Pareto front as a picture and a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmpq.report.figures import change, number, seconds
from llmpq.report.markup import Content, Html, section, table, tag
from planner.explanation.explain import Explanation
from planner.plan.spec import PlanSpec
from planner.search.front import FrontPoint

CHART_WIDTH, CHART_HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 74, 24, 22, 56
TICKS = 4


@dataclass(frozen=True)
class Spot:
    """A plan by its simulated latency and its summed sensitivity, and the theta that gives it."""

    theta: float
    latency_s: float
    sensitivity: float


def pareto(plan: PlanSpec, explanation: Explanation | None, front: Sequence[FrontPoint]) -> Html:
    """Latency against quality: the given front, else what other thetas gave."""
    present = Spot(plan.solver.theta, plan.predicted.latency_s, plan.solver.sensitivity)
    spots = [Spot(each.theta, each.latency_s, each.omega) for each in front]
    if not spots and explanation is not None:
        spots = [
            Spot(answer.theta, answer.predicted_s, answer.sensitivity)
            for answer in explanation.answers.of("theta")
        ]
    if not spots:
        return Html("")
    points = _undominated([present, *spots])
    rows = [_front_row(point, present) for point in points]
    heads = ["plan", "theta", "batch", "against this plan", "sensitivity"]
    text = (
        "Every point is the best plan for another theta, by the closed form that plans are ranked "
        "by; its seconds are simulated. The large one is this plan. Left is faster, down is better "
        "quality."
    )
    if len(points) == 1:
        thetas = sorted({point.theta for point in (present, *spots)})
        text = (
            f"Theta from {number(thetas[0])} to {number(thetas[-1])} gives no plan that is better "
            "in one and not worse in the other: quality and speed do not compete here."
        )
    chart = [tag("figure", _chart(points, present))] if len(points) > 1 else []
    return section(
        "pareto",
        "Latency against quality",
        tag("p", text, class_="note"),
        *chart,
        table("Plans that no other one beats in both", heads, rows),
    )


def _front_row(point: Spot, present: Spot) -> list[Content]:
    name: Content = tag("strong", "this plan") if point == present else "other theta"
    later_s = point.latency_s - present.latency_s
    return [
        name,
        number(point.theta),
        seconds(point.latency_s),
        change(later_s),
        number(point.sensitivity),
    ]


def _undominated(points: Iterable[Spot]) -> list[Spot]:
    """From the fastest on; of equals the first one given."""
    kept: list[Spot] = []
    for point in sorted(points, key=lambda each: (each.latency_s, each.sensitivity)):
        if not kept or point.sensitivity < kept[-1].sensitivity:
            kept.append(point)
    return kept


def _chart(points: Sequence[Spot], present: Spot) -> Html:
    """A scatter with axes from the least to the greatest value."""
    x_axis = _Axis.over([p.latency_s for p in points], LEFT, CHART_WIDTH - RIGHT)
    y_axis = _Axis.over([p.sensitivity for p in points], CHART_HEIGHT - BOTTOM, TOP)
    spots = [(x_axis.at(p.latency_s), y_axis.at(p.sensitivity), p) for p in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in spots)
    marks = [
        tag(
            "circle",
            tag("title", _spot_title(p)),
            cx=f"{x:.1f}",
            cy=f"{y:.1f}",
            r=8 if p == present else 5,
            class_="spot present" if p == present else "spot",
        )
        for x, y, p in spots
    ]
    label = "latency of a batch against summed sensitivity: " + "; ".join(
        _spot_title(p) for p in points
    )
    return tag(
        "svg",
        *_grid(x_axis, y_axis),
        tag("polyline", points=path, class_="front"),
        *marks,
        viewBox=f"0 0 {CHART_WIDTH} {CHART_HEIGHT}",
        class_="chart",
        role="img",
        aria_label=label,
    )


def _spot_title(point: Spot) -> str:
    return (
        f"theta {number(point.theta)}: {seconds(point.latency_s)}, "
        f"sensitivity {number(point.sensitivity)}"
    )


@dataclass(frozen=True)
class _Axis:
    """Maps values to pixels; `low` and `high` are at `first` and `last`."""

    low: float
    high: float
    first: float
    last: float

    @classmethod
    def over(cls, values: Sequence[float], first: float, last: float) -> _Axis:
        low, high = min(values), max(values)
        margin = 0.08 * (high - low) or abs(low) or 1.0
        return cls(max(0.0, low - margin), high + margin, first, last)

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    def text(self, value: float) -> str:
        """With as many decimals as tell neighbouring ticks apart."""
        step = (self.high - self.low) / TICKS
        return f"{value:.{max(0, 1 - math.floor(math.log10(step)))}f}"

    def ticks(self) -> list[float]:
        return [self.low + (self.high - self.low) * step / TICKS for step in range(TICKS + 1)]


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[Html]:
    """Lines with their values, and what the axes mean."""
    parts = []
    for value in x_axis.ticks():
        x = f"{x_axis.at(value):.1f}"
        parts.append(tag("line", x1=x, x2=x, y1=y_axis.last, y2=y_axis.first, class_="grid"))
        parts.append(
            tag("text", x_axis.text(value), x=x, y=y_axis.first + 20, text_anchor="middle")
        )
    for value in y_axis.ticks():
        y = y_axis.at(value)
        parts.append(tag("line", x1=x_axis.first, x2=x_axis.last, y1=y, y2=y, class_="grid"))
        parts.append(
            tag("text", y_axis.text(value), x=x_axis.first - 8, y=y + 5, text_anchor="end")
        )
    middle = (x_axis.first + x_axis.last) / 2
    parts.append(tag("text", "seconds a batch", x=middle, y=CHART_HEIGHT - 8, text_anchor="middle"))
    parts.append(tag("text", "summed sensitivity", x=4, y=14))
    return parts
