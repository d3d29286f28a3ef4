"""The Pareto front, latency against summed sensitivity: a picture and its plans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmpq.report.formatting import duration, number
from llmpq.report.pictures.axes import Axis
from llmpq.report.pictures.curve import plan_choice
from llmpq.report.pictures.writing import write_picture
from llmpq.report.rendering import render
from planner.explanation.explain import Explanation
from planner.plan.spec import PlanSpec
from planner.search.find import FrontPoint, front_json
from quant.common.errors import SpecError

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 84, 28, 44, 62
SAME_S = 1e-2
"""Share of the seconds by which two searches may differ that end at the same sensitivity: there the
picture has one plan.
"""


@dataclass(frozen=True)
class PlanPoint:
    """A plan by its simulated latency and its summed sensitivity, and the theta that gives it.

    `bits`: mean bitwidth of a layer, None where it is not to be shown.
    """

    theta: float
    latency_s: float
    sensitivity: float
    bits: float | None = None

    @property
    def title(self) -> str:
        """The figures of the plan in words."""
        bits = "" if self.bits is None else f", {self.bits:.1f} bits a layer"
        return (
            f"theta {number(self.theta)}: {duration(self.latency_s)}, "
            f"sensitivity {number(self.sensitivity)}{bits}"
        )


@dataclass(frozen=True)
class EndLabel:
    """Words beside a spot, at the pixels where they begin, or end where `anchor` is "end"."""

    text: str
    x: float
    y: float
    anchor: str


@dataclass(frozen=True)
class Chart:
    """A scatter of `points`, fastest first, of which `present` is drawn large."""

    points: Sequence[PlanPoint]
    present: PlanPoint | None = None
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def latency(self) -> Axis:
        """Seconds, from left to right."""
        return Axis.over([point.latency_s for point in self.points], LEFT, self.width - RIGHT)

    @property
    def sensitivity(self) -> Axis:
        """Summed sensitivity, from the bottom up."""
        values = [point.sensitivity for point in self.points]
        return Axis.over(values, self.height - BOTTOM, TOP)

    @property
    def spots(self) -> Sequence[tuple[float, float, PlanPoint]]:
        """Each point with its pixels."""
        x, y = self.latency, self.sensitivity
        return [(x.at(point.latency_s), y.at(point.sensitivity), point) for point in self.points]

    @property
    def labels(self) -> Sequence[EndLabel]:
        """Names of the plan that the page is about and of the two ends, where they have room."""
        spots = self.spots
        names: dict[int, list[str]] = {}
        for index, (_, _, point) in enumerate(spots):
            if point == self.present:
                names[index] = ["this plan"]
        for index, name in ((0, "fastest"), (len(spots) - 1, "best quality")):
            names.setdefault(index, []).append(name)
        placed: list[EndLabel] = []
        for index, words in names.items():
            left, top, _ = spots[index]
            is_right = left > self.width / 2
            x, anchor = (left - 14, "end") if is_right else (left + 14, "start")
            label = EndLabel(", ".join(words), x, top - 10, anchor)
            if all(abs(label.y - other.y) > 18 or abs(label.x - other.x) > 130 for other in placed):
                placed.append(label)
        return placed


@dataclass(frozen=True)
class Front:
    """Plans that no other one beats in both, fastest first, from those of `thetas`, ascending."""

    present: PlanPoint
    points: Sequence[PlanPoint]
    thetas: Sequence[float]


def front_of(
    plan: PlanSpec, explanation: Explanation | None, front: Sequence[FrontPoint]
) -> Front | None:
    """The given front, else what other thetas gave, with `plan`; None where neither is known."""
    bits = plan_choice(plan).mean_bits
    present = PlanPoint(plan.solver.theta, plan.predicted.latency_s, plan.solver.sensitivity, bits)
    others = [
        PlanPoint(each.theta, each.latency_s, each.omega, each.bits)
        for each in front
        if not _is_planned(plan, each)
    ]
    if front and not others:
        return Front(present, [present], [present.theta])
    if not others and explanation is not None:
        others = [
            PlanPoint(answer.theta, answer.predicted_s, answer.sensitivity)
            for answer in explanation.answers.of("theta")
        ]
    if not others:
        return None
    thetas = sorted({point.theta for point in (present, *others)})
    return Front(present, _undominated([present, *others]), thetas)


def _is_planned(plan: PlanSpec, point: FrontPoint) -> bool:
    """Whether a point of a front is `plan`, which another search with another theta found again, a
    little faster or slower by its gap.
    """
    latency_s, sensitivity = plan.predicted.latency_s, plan.solver.sensitivity
    same = math.isclose(point.omega, sensitivity, rel_tol=1e-6, abs_tol=1e-12)
    return same and math.isclose(point.latency_s, latency_s, rel_tol=SAME_S)


def _undominated(points: Iterable[PlanPoint]) -> list[PlanPoint]:
    """Points that no other one beats in both, fastest first; the first given one of equals."""
    kept: list[PlanPoint] = []
    for point in sorted(points, key=lambda each: (each.latency_s, each.sensitivity)):
        if not kept or point.sensitivity < kept[-1].sensitivity:
            kept.append(point)
    return kept


def front_beside(plan: PlanSpec, front: Sequence[FrontPoint]) -> list[FrontPoint]:
    """The points of a given front that the page of `plan` has, with the plan's own figures."""
    found = front_of(plan, None, front)
    if found is None:
        return []
    p = plan.predicted
    own = FrontPoint(
        theta=plan.solver.theta,
        latency_s=p.latency_s,
        objective_latency_s=p.objective_latency_s,
        tokens_per_s=p.tokens_per_s,
        in_flight=plan.workload.global_batch,
        omega=plan.solver.sensitivity,
        bits=plan_choice(plan).mean_bits,
    )
    given = {(each.theta, each.latency_s): each for each in front}
    return [
        own if point == found.present else given[point.theta, point.latency_s]
        for point in found.points
    ]


def write_front(path: str | Path, points: Sequence[FrontPoint], whole: str = "batch") -> None:
    """Write the picture (`.svg`) or the figures (`.json`) of a front, whole or not at all; `whole`:
    what the seconds are of, a batch or a job.

    Raises SpecError for any other ending, and where it cannot be written.
    """
    target = Path(path)
    if target.suffix == ".svg":
        plans = [PlanPoint(each.theta, each.latency_s, each.omega, each.bits) for each in points]
        text = render("front.svg.j2", chart=Chart(plans), whole=whole, alone=True)
    elif target.suffix == ".json":
        text = front_json(points)
    else:
        raise SpecError(f"{target}: the front is written as .svg or .json")
    write_picture(target, text)
