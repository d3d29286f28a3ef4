"""The curve of a job: tokens per second over prompts in flight, and what quality that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmpq.report.formatting import count, listed, number, per_second, plural
from llmpq.report.pictures.axes import Axis, CountAxis
from llmpq.report.pictures.writing import write_picture
from llmpq.report.rendering import render
from planner.plan.spec import PlanChoice, PlanSpec
from quant.common.errors import SpecError

WIDTH, HEIGHT = 560, 430
LEFT, RIGHT = 74, 24
SPEED = (268.0, 26.0)
"""Pixels of the bottom and the top of the tokens per second; `QUALITY` those of the sensitivity."""
QUALITY = (374.0, 304.0)
LABEL_HEIGHT, LETTER = 16, 7.5  # pixels


@dataclass(frozen=True)
class Spot:
    """A plan with its pixels; `names`: what it is, where it is more than a point of the curve."""

    plan: PlanChoice
    names: tuple[str, ...]
    x: float
    speed_y: float
    quality_y: float
    is_present: bool

    @property
    def title(self) -> str:
        """The figures of the plan in words."""
        plan = self.plan
        names = f"{listed(list(self.names))}: " if self.names else ""
        return (
            f"{names}{count(plan.in_flight)} in flight, {per_second(plan.tokens_per_s)} tokens/s, "
            f"sensitivity {number(plan.sensitivity)}, {plan.mean_bits:.1f} bits a layer"
        )


@dataclass(frozen=True)
class Label:
    """Names beside a spot, at the pixels of their middle and base line."""

    text: str
    x: float
    y: float

    def overlaps(self, other: Label) -> bool:
        """Whether two labels cover each other."""
        wide = (len(self.text) + len(other.text)) * LETTER / 2
        return abs(self.x - other.x) < wide and abs(self.y - other.y) < LABEL_HEIGHT


@dataclass(frozen=True)
class JobCurve:
    """The best plans at other prompts in flight, ascending, with the plan itself, `present`.

    `named`: plans that are more than a point of the curve, with what they are.
    """

    points: Sequence[PlanChoice]
    present: PlanChoice
    named: Mapping[PlanChoice, tuple[str, ...]]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT

    @property
    def in_flight(self) -> CountAxis:
        """Prompts in flight, from left to right."""
        return CountAxis.over([plan.in_flight for plan in self._all], self.left, self.right)

    @property
    def speed(self) -> Axis:
        """Tokens per second, from the bottom up."""
        return Axis.from_zero([plan.tokens_per_s for plan in self._all], *SPEED)

    @property
    def quality(self) -> Axis:
        """Summed sensitivity, from the bottom up."""
        return Axis.from_zero([plan.sensitivity for plan in self._all], *QUALITY)

    @property
    def ticks(self) -> Sequence[tuple[float, str]]:
        """Pixels of prompts in flight, those of the plan and of the ends first."""
        counts = [plan.in_flight for plan in self._all]
        return self.in_flight.ticks([self.present.in_flight, min(counts), max(counts), *counts])

    @property
    def line(self) -> Sequence[Spot]:
        """The spots that are joined by a line."""
        return [self._spot(plan) for plan in self.points]

    @property
    def spots(self) -> Sequence[Spot]:
        """All plans; the one that the page is about is drawn last, above the others."""
        others = [self._spot(plan) for plan in self._all if plan != self.present]
        return [*others, self._spot(self.present)]

    @property
    def labels(self) -> Sequence[Label]:
        """Names beside their spots, where they do not cover each other."""
        placed: list[Label] = []
        for spot in reversed(self.spots):
            if spot.names:
                choices = _labels(", ".join(spot.names), spot, self.width)
                free = (each for each in choices if not any(map(each.overlaps, placed)))
                placed.append(next(free, choices[0]))
        return placed

    @property
    def _all(self) -> Sequence[PlanChoice]:
        return list(dict.fromkeys((*self.points, *self.named)))

    def _spot(self, plan: PlanChoice) -> Spot:
        return Spot(
            plan=plan,
            names=self.named.get(plan, ()),
            x=self.in_flight.at(plan.in_flight),
            speed_y=self.speed.at(plan.tokens_per_s),
            quality_y=self.quality.at(plan.sensitivity),
            is_present=plan == self.present,
        )


def _labels(text: str, spot: Spot, width: int) -> Sequence[Label]:
    """Places for a label: above its spot, below it, and further away; within the picture."""
    half = len(text) * LETTER / 2
    x = min(max(spot.x, half + 2), width - half - 2)
    steps = (-14, 24, -30, 40, -46, 56)
    return [Label(text, x, spot.speed_y + step) for step in steps]


def plan_choice(plan: PlanSpec) -> PlanChoice:
    """The plan as one choice among those for the same job."""
    bits = [each for stage in plan.stages for each in stage.bitwidths]
    return PlanChoice(
        in_flight=plan.workload.global_batch,
        tokens_per_s=plan.predicted.tokens_per_s,
        sensitivity=max(0.0, plan.solver.sensitivity),
        mean_bits=sum(bits) / len(bits),
    )


def curve_of(plan: PlanSpec) -> JobCurve | None:
    """The curve of the plan's job; None where no other number in flight is known."""
    if plan.job is None:
        return None
    present = plan_choice(plan)
    others = [each for each in plan.beside.curve if each.in_flight != present.in_flight]
    if not others:
        return None
    names: dict[PlanChoice, tuple[str, ...]] = {present: ("this plan",)}
    taken = [each.plan for each in plan.beside.qualities if each.quality == plan.beside.quality]
    for each in plan.beside.qualities:
        choice = present if each.plan in taken else each.plan
        names[choice] = (*names.get(choice, ()), each.quality)
    points = sorted((*others, present), key=lambda each: each.in_flight)
    return JobCurve(points, present, names)


def write_curve(path: str | Path, plan: PlanSpec) -> None:
    """Write the curve of the plan's job as an SVG picture, whole or not at all.

    Raises SpecError where the plan has no curve, and where it cannot be written.
    """
    target = Path(path)
    curve = curve_of(plan)
    if curve is None:
        what = "is of one batch" if plan.job is None else "was made for one number in flight"
        raise SpecError(
            f"{target}: the plan {what} and has no curve; plan a job of "
            f"{plural(2, 'prompt')} or more with --in_flight auto"
        )
    if target.suffix != ".svg":
        raise SpecError(f"{target}: the curve is written as .svg")
    write_picture(target, render("curve.svg.j2", curve=curve, alone=True))
