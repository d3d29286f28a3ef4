"""Requests per second over bounds on their latency: the picture of the fronts, and its file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from llmpq.report.charts import ACCENT, INK, Axis, columns, label, polyline, rows, spot, svg, text
from llmpq.report.formatting import seconds
from llmpq.report.latency import kind_name, requests_per_second
from llmpq.report.plan_charts import LABEL_HEIGHT, save_front
from planner.latency_bound.bounded_plan import KindFronts, LatencyPoint, reason_of
from planner.plan.parts import LatencyForecast
from planner.scheduling import ScheduleKind

BOUNDS_SIZE = (640, 360)

KIND_LOOKS: dict[ScheduleKind, tuple[str, str]] = {
    "rra": (ACCENT, ""),
    "waa-c": ("#b0500f", "8 4"),
    "waa-m": ("#2f7d73", "2 3"),
}
"""Colours of the kinds, and dashes for those to whom these look alike."""


def write_latency_front(path: str | Path, fronts: KindFronts) -> None:
    save_front(path, lambda: bounds_svg(fronts, alone=True), fronts.to_json)


def winners(fronts: KindFronts) -> list[str]:
    """A sentence for each span of bounds that one of several kinds of schedule is best for, with
    what makes it so, and for each kind that cannot be had.
    """
    runs = fronts.runs if len(fronts.kinds) > 1 else []
    found = []
    for index, run in enumerate(runs, start=1):
        until = f"to {seconds(runs[index][0].bound_s)}" if index < len(runs) else "on"
        kind = kind_name(run[-1].best.schedule.kind)
        found.append(f"from {seconds(run[0].bound_s)} {until}: {kind}, {reason_of(run)}")
    return [*found, *(f"no {kind_name(each.kind)}: {each.problem}" for each in fronts.left_out)]


def bounds_svg(
    fronts: KindFronts, present: LatencyForecast | None = None, alone: bool = False
) -> Markup:
    """Requests per second over bounds on their latency, a line for each kind of schedule, with a
    ring for the plan that the page is about; one of any latency is at the right end.
    """
    width, height = BOUNDS_SIZE
    left, right = 74, width - 84
    plans = [] if present is None else [present]
    own_bounds = [each.bound_s for each in plans if each.bound_s is not None]
    x = Axis.of_counts([*(each.bound_s for each in fronts.points), *own_bounds], left, right)
    rates = [each.requests_per_s for each in fronts.points]
    rates += [each.requests_per_s for each in plans]
    y = Axis.from_zero(rates, height - 62, 44)
    values = sorted({float(f"{each.bound_s:.3g}") for each in fronts.points})
    lines = {kind: fronts.front(kind) for kind in fronts.kinds}
    names = _line_ends({kind: y.at(each[-1].requests_per_s) for kind, each in lines.items()})
    titles = "; ".join(_bound_title(point) for points in lines.values() for point in points)
    said = f"requests per second over bounds on their latency: {titles}"
    parts = [
        *columns(x.chosen([values[0], values[-1], *values]), y.first, y.last),
        *rows(y.ticks, x.first, x.last),
        text(
            (x.first + x.last) / 2, height - 10, "bound on the latency of a request (s)", "title",
            text_anchor="middle",
        ),
        text(10, 22, "requests per second", "title"),
    ]  # fmt: skip
    for kind, points in lines.items():
        colour, dashes = KIND_LOOKS[kind]
        spots = [(x.at(each.bound_s), y.at(each.requests_per_s)) for each in points]
        parts.append(polyline(spots, f"front {kind}", stroke=colour, stroke_dasharray=dashes))
        parts += [
            spot(*pixels, _bound_title(point), f"spot {kind}", colour)
            for pixels, point in zip(spots, points, strict=True)
        ]
        parts.append(label(right + 4, names[kind], kind_name(kind)))
    for plan in plans:
        at = x.last if plan.bound_s is None else x.at(plan.bound_s)
        ring = {"r": 9, "stroke": INK, "stroke_width": 3}
        parts.append(spot(at, y.at(plan.requests_per_s), "this plan", "here", "none", **ring))
    return svg(BOUNDS_SIZE, said, parts, alone)


def _line_ends(ends: Mapping[ScheduleKind, float]) -> dict[ScheduleKind, float]:
    """Pixels of the names of lines that end at these pixels: beside the ends, and apart."""
    places: dict[ScheduleKind, float] = {}
    above = math.inf
    for kind, y in sorted(ends.items(), key=lambda each: -each[1]):
        above = places[kind] = min(y + 5, above - LABEL_HEIGHT - 1)
    return places


def _bound_title(point: LatencyPoint) -> str:
    return (
        f"{kind_name(point.schedule.kind)} within {seconds(point.bound_s)}: "
        f"{requests_per_second(point.requests_per_s)}, {seconds(point.latency_s)}"
    )
