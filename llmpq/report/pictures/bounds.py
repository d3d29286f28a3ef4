"""Throughput over bounds on the latency of requests: a curve for each kind of schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmpq.report.formatting import seconds
from llmpq.report.latency import kind_name, requests_per_second
from llmpq.report.pictures.axes import Axis, CountAxis
from llmpq.report.pictures.writing import write_picture
from llmpq.report.rendering import render
from planner.latency_bound.front import BoundRow, KindFronts, LatencyPoint, reason_of
from planner.plan.forecasts import LatencyForecast
from planner.scheduling import ScheduleKind
from quant.common.errors import SpecError

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 74, 84, 44, 62
LABEL_HEIGHT = 17
DASHES: dict[ScheduleKind, str] = {"rra": "", "waa-c": "8 4", "waa-m": "2 3"}
"""How the lines of the kinds look, for those to whom their colours look alike."""


def winners(fronts: KindFronts) -> list[str]:
    """A sentence for each span of bounds that one of several kinds of schedule is best for, with
    what makes it so, and for each kind that cannot be had.
    """
    runs: list[list[BoundRow]] = fronts.runs if len(fronts.kinds) > 1 else []
    found = []
    for number, run in enumerate(runs, start=1):
        until = f"to {seconds(runs[number][0].bound_s)}" if number < len(runs) else "on"
        kind = kind_name(run[-1].best.schedule.kind)
        found.append(f"from {seconds(run[0].bound_s)} {until}: {kind}, {reason_of(run)}")
    return [*found, *(f"no {kind_name(each.kind)}: {each.problem}" for each in fronts.left_out)]


@dataclass(frozen=True)
class Spot:
    """A point with its pixels."""

    point: LatencyPoint
    x: float
    y: float

    @property
    def title(self) -> str:
        """The figures of the point in words."""
        point = self.point
        return (
            f"{kind_name(point.schedule.kind)} within {seconds(point.bound_s)}: "
            f"{requests_per_second(point.requests_per_s)}, {seconds(point.latency_s)}"
        )


@dataclass(frozen=True)
class Line:
    """The spots of one kind of schedule, and the place of its name."""

    kind: ScheduleKind
    spots: Sequence[Spot]
    label_y: float

    @property
    def name(self) -> str:
        """The paper's name of the kind."""
        return kind_name(self.kind)

    @property
    def dashes(self) -> str:
        """The pattern of the line."""
        return DASHES[self.kind]


@dataclass(frozen=True)
class BoundCurves:
    """Requests per second over bounds, a line for each kind of schedule. `present`: the plan that
    the page is about.
    """

    fronts: KindFronts
    present: LatencyForecast | None = None
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def bounds(self) -> CountAxis:
        """Bounds in seconds, from left to right."""
        values = [each.bound_s for each in self.fronts.points]
        if self.present is not None and self.present.bound_s is not None:
            values.append(self.present.bound_s)
        return CountAxis.over(values, LEFT, self.width - RIGHT)

    @property
    def speed(self) -> Axis:
        """Requests per second, from the bottom up."""
        values = [each.requests_per_s for each in self.fronts.points]
        if self.present is not None:
            values.append(self.present.requests_per_s)
        return Axis.from_zero(values, self.height - BOTTOM, TOP)

    @property
    def ticks(self) -> Sequence[tuple[float, str]]:
        """Pixels of bounds with their numbers, those of the ends first."""
        values = sorted({float(f"{each.bound_s:.3g}") for each in self.fronts.points})
        return self.bounds.ticks([values[0], values[-1], *values])

    @property
    def lines(self) -> Sequence[Line]:
        """The lines, their names at their right ends, apart from each other."""
        found = {kind: self._spots(kind) for kind in self.fronts.kinds}
        places: dict[ScheduleKind, float] = {}
        above = float("inf")
        for kind, spots in sorted(found.items(), key=lambda each: -each[1][-1].y):
            above = places[kind] = min(spots[-1].y + 5, above - LABEL_HEIGHT)
        return [Line(kind, spots, places[kind]) for kind, spots in found.items()]

    @property
    def present_spot(self) -> tuple[float, float] | None:
        """The pixels of the plan that the page is about; one of any latency is at the right end."""
        if self.present is None:
            return None
        bound_s = self.present.bound_s
        x = self.bounds.last if bound_s is None else self.bounds.at(bound_s)
        return x, self.speed.at(self.present.requests_per_s)

    @property
    def label_x(self) -> float:
        """The pixel at which names begin."""
        return self.width - RIGHT + 4

    def _spots(self, kind: ScheduleKind) -> list[Spot]:
        return [
            Spot(each, self.bounds.at(each.bound_s), self.speed.at(each.requests_per_s))
            for each in self.fronts.front(kind)
        ]


def write_latency_front(path: str | Path, fronts: KindFronts) -> None:
    """Write the picture (`.svg`) or the figures (`.json`) of throughput over bounds, whole or not
    at all. Raises SpecError for any other ending, and where it cannot be written.
    """
    target = Path(path)
    if target.suffix == ".svg":
        text = render("bounds.svg.j2", curves=BoundCurves(fronts), alone=True)
    elif target.suffix == ".json":
        text = fronts.to_json()
    else:
        raise SpecError(f"{target}: the front is written as .svg or .json")
    write_picture(target, text)
