"""Pictures of plans: the curve of a job, the front, throughput over bounds, the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup

from llmpq.report.charts import ACCENT, CARD, Axis, columns, label, polyline, rows, spot, svg, text
from llmpq.report.formatting import count, duration, listed, number, per_second, shortened
from llmpq.report.quality import divergence_of, lost, percent_more
from llmpq.report.rendering import write_picture
from planner.explanation.explain import Explanation
from planner.plan.builder import plan_choice
from planner.plan.parts import DivergenceScale, PlanChoice
from planner.plan.simulate import simulated_cycles
from planner.plan.spec import PlanSpec
from planner.search.find import FrontPoint, front_json
from planner.simulation.pictures import GanttOptions, gantt_svg
from planner.simulation.simulation import Simulated
from quant.common.errors import SpecError

CURVE_SIZE, FRONT_SIZE = (560, 430), (560, 340)
SPEED_Y, QUALITY_Y = (268.0, 26.0), (374.0, 304.0)
"""Pixels of the bottom and the top of the two panels of a curve."""
LABEL_HEIGHT, LETTER = 16, 7.5  # pixels

SAME_S = 1e-2
"""Share of the seconds by which two searches may differ that end at the same sensitivity: there the
picture has one plan.
"""

GANTT_WIDTH = 800  # pixels of the drawing; with its labels as wide as the page's text
GANTT_LABEL = 24  # characters
ROUNDS_SHOWN = 4  # decode rounds after the first tokens, in the second picture


@dataclass(frozen=True)
class JobCurve:
    """The best plans by prompts in flight, ascending, `present` among them; `named`: others;
    `scale`: of their sensitivities, None where it is not known.
    """

    points: Sequence[PlanChoice]
    present: PlanChoice
    named: Mapping[PlanChoice, tuple[str, ...]]
    scale: DivergenceScale | None

    @property
    def plans(self) -> Sequence[PlanChoice]:
        """All plans; the one that the page is about is drawn last, above the others."""
        others = dict.fromkeys((*self.points, *self.named))
        return [*(each for each in others if each != self.present), self.present]

    def names(self, plan: PlanChoice) -> str:
        return ", ".join(self.named.get(plan, ()))

    def lost(self, plan: PlanChoice) -> float:
        """More perplexity in percent, or the sensitivity."""
        if self.scale is None:
            return plan.sensitivity
        return percent_more(self.scale.at(plan.sensitivity))


def curve_of(plan: PlanSpec) -> JobCurve | None:
    present = plan_choice(plan)
    others = [each for each in plan.beside.curve if each.in_flight != present.in_flight]
    if plan.job is None or not others:
        return None
    names: dict[PlanChoice, tuple[str, ...]] = {present: ("this plan",)}
    taken = [each.plan for each in plan.beside.qualities if each.quality == plan.beside.quality]
    for each in plan.beside.qualities:
        choice = present if each.plan in taken else each.plan
        names[choice] = (*names.get(choice, ()), each.quality)
    points = sorted((*others, present), key=lambda each: each.in_flight)
    scale = None if plan.quality is None else plan.quality.scale
    return JobCurve(points, present, names, scale)


def curve_svg(curve: JobCurve, alone: bool = False) -> Markup:
    """Tokens per second over prompts in flight, and below it what quality that takes."""
    left, right = 74, CURVE_SIZE[0] - 24
    counts = [plan.in_flight for plan in curve.plans]
    x = Axis.of_counts(counts, left, right)
    ticks = x.chosen([curve.present.in_flight, min(counts), max(counts), *sorted(counts)])
    speed = Axis.from_zero([plan.tokens_per_s for plan in curve.plans], *SPEED_Y)
    quality = Axis.from_zero([curve.lost(plan) for plan in curve.plans], *QUALITY_Y)

    def panel(title: str, y: Axis, figure: Callable[[PlanChoice], float]) -> Iterator[Markup]:
        yield text(10, y.last - 10, title, "title")
        yield from rows(y.ticks, left, right)
        yield polyline((x.at(plan.in_flight), y.at(figure(plan))) for plan in curve.points)
        for plan in curve.plans:
            is_present = plan == curve.present
            named = plan in curve.named and not is_present
            style = f"spot{' present' if is_present else ''}{' named' if named else ''}"
            look = {"r": 8 if is_present else 5, "stroke": ACCENT, "stroke_width": 2}
            fill, title = CARD if named else ACCENT, _choice_title(curve, plan)
            yield spot(x.at(plan.in_flight), y.at(figure(plan)), title, style, fill, **look)

    named = [
        (curve.names(plan), x.at(plan.in_flight), speed.at(plan.tokens_per_s))
        for plan in reversed(curve.plans)
        if plan in curve.named
    ]
    parts = [
        *columns(ticks, quality.first, speed.last),
        text(
            (left + right) / 2, CURVE_SIZE[1] - 8, "prompts in flight", "title",
            text_anchor="middle",
        ),
        *panel("new tokens per second", speed, lambda plan: plan.tokens_per_s),
        *panel(_title(curve.scale is not None), quality, curve.lost),
        *(label(at, y, words, "middle") for words, at, y in _apart(named, CURVE_SIZE[0])),
    ]  # fmt: skip
    titles = "; ".join(_choice_title(curve, plan) for plan in curve.plans)
    said = f"tokens per second and quality over prompts in flight: {titles}"
    return svg(CURVE_SIZE, said, parts, alone)


def _title(is_known: bool) -> str:
    """The name of the axis of what plans lose."""
    lost = "more perplexity, in %" if is_known else "summed sensitivity, no unit"
    return f"{lost} (less is better)"


def _choice_title(curve: JobCurve, plan: PlanChoice) -> str:
    names = curve.named.get(plan)
    divergence = None if curve.scale is None else curve.scale.at(plan.sensitivity)
    return (
        f"{f'{listed(list(names))}: ' if names else ''}{count(plan.in_flight)} in flight, "
        f"{per_second(plan.tokens_per_s)} tokens/s, {lost(plan.sensitivity, divergence)}, "
        f"{plan.mean_bits:.1f} bits a layer"
    )


def _apart(named: Iterable[tuple[str, float, float]], width: int) -> list[tuple[str, float, float]]:
    """Words with the pixels of their middle and base line, beside their spots, where they do not
    cover each other: above its spot, below it, and further away; within the picture.
    """
    placed: list[tuple[str, float, float]] = []

    def is_free(words: str, x: float, y: float) -> bool:
        return all(
            abs(x - other_x) >= (len(words) + len(other)) * LETTER / 2
            or abs(y - other_y) >= LABEL_HEIGHT
            for other, other_x, other_y in placed
        )

    for words, spot_x, spot_y in named:
        half = len(words) * LETTER / 2
        x = min(max(spot_x, half + 2), width - half - 2)
        choices = [spot_y + step for step in (-14, 24, -30, 40, -46, 56)]
        placed.append((words, x, next((y for y in choices if is_free(words, x, y)), choices[0])))
    return placed


@dataclass(frozen=True)
class PlanPoint:
    """A plan by its simulated latency and its summed sensitivity, and the theta that gives it.

    `bits`: mean bitwidth of a layer, None where it is not to be shown; `divergence`: what the
    sensitivity is in nats a token, None where it is not known.
    """

    theta: float
    latency_s: float
    sensitivity: float
    bits: float | None = None
    divergence: float | None = None

    @property
    def lost(self) -> float:
        """More perplexity in percent, or the sensitivity."""
        return self.sensitivity if self.divergence is None else percent_more(self.divergence)

    @property
    def title(self) -> str:
        bits = "" if self.bits is None else f", {self.bits:.1f} bits a layer"
        what = lost(self.sensitivity, self.divergence)
        return f"theta {number(self.theta)}: {duration(self.latency_s)}, {what}{bits}"


def front_svg(
    points: Sequence[PlanPoint], whole: str, present: PlanPoint | None = None, alone: bool = False
) -> Markup:
    """Latency against quality, fastest first, `present` drawn large; seconds of the `whole`."""
    width, height = FRONT_SIZE
    x = Axis.over([point.latency_s for point in points], 84, width - 28)
    y = Axis.over([point.lost for point in points], height - 62, 44)
    spots = [(x.at(point.latency_s), y.at(point.lost)) for point in points]
    own = [index for index, point in enumerate(points) if point == present]
    parts = [
        *columns(x.ticks, y.first, y.last),
        *rows(y.ticks, x.first, x.last),
        text(
            (x.first + x.last) / 2, height - 10, f"seconds of the {whole} (s)", "title",
            text_anchor="middle",
        ),
        text(10, 22, _title(all(each.divergence is not None for each in points)), "title"),
        polyline(spots),
        *(
            spot(*pixels, point.title, *(("spot present",) if index in own else ()),
                 r=8 if index in own else 5)
            for index, (pixels, point) in enumerate(zip(spots, points, strict=True))
        ),
        *_end_labels(spots, own, width),
    ]  # fmt: skip
    said = "; ".join(point.title for point in points)
    return svg(FRONT_SIZE, f"latency against quality: {said}", parts, alone)


def _end_labels(
    spots: Sequence[tuple[float, float]], own: Sequence[int], width: int
) -> Iterator[Markup]:
    """Names of the plan that the page is about and of the two ends, where they have room."""
    names = {index: ["this plan"] for index in own}
    for index, name in ((0, "fastest"), (len(spots) - 1, "best quality")):
        names.setdefault(index, []).append(name)
    placed: list[tuple[float, float]] = []
    for index, words in names.items():
        left, top = spots[index]
        x, anchor = (left - 14, "end") if left > width / 2 else (left + 14, "start")
        y = top - 10
        if all(abs(y - other_y) > 18 or abs(x - other_x) > 130 for other_x, other_y in placed):
            placed.append((x, y))
            yield label(x, y, ", ".join(words), anchor)


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
    present, *others = map(_plan_point, [_own_point(plan), *_beside(plan, front)])
    if front and not others:
        return Front(present, [present], [present.theta])
    if not others and explanation is not None:
        others = [
            PlanPoint(
                answer.theta,
                answer.predicted_s,
                answer.sensitivity,
                divergence=divergence_of(plan, answer.sensitivity),
            )
            for answer in explanation.answers.of("theta")
        ]
    if not others:
        return None
    thetas = sorted({point.theta for point in (present, *others)})
    return Front(present, _undominated([present, *others]), thetas)


def _plan_point(point: FrontPoint) -> PlanPoint:
    return PlanPoint(point.theta, point.latency_s, point.omega, point.bits, point.divergence)


def _beside(plan: PlanSpec, front: Sequence[FrontPoint]) -> list[FrontPoint]:
    """The other points of a front, with what `plan` says of their sensitivities."""
    others = (each for each in front if not _is_planned(plan, each))
    return [replace(each, divergence=divergence_of(plan, each.omega)) for each in others]


def _is_planned(plan: PlanSpec, point: FrontPoint) -> bool:
    """Whether a point of a front is `plan`, found again a little faster or slower by its gap."""
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
    given = {(each.theta, each.latency_s): each for each in _beside(plan, front)}
    return [
        _own_point(plan) if point == found.present else given[point.theta, point.latency_s]
        for point in found.points
    ]


def _own_point(plan: PlanSpec) -> FrontPoint:
    p = plan.predicted
    return FrontPoint(
        theta=plan.solver.theta,
        latency_s=p.latency_s,
        objective_latency_s=p.objective_latency_s,
        tokens_per_s=p.tokens_per_s,
        in_flight=plan.workload.global_batch,
        omega=plan.solver.sensitivity,
        bits=plan_choice(plan).mean_bits,
        divergence=divergence_of(plan, plan.solver.sensitivity),
    )


def save_front(path: str | Path, picture: Callable[[], str], figures: Callable[[], str]) -> None:
    """Write a front as `.svg` or `.json`, whole or not at all; SpecError where it cannot be."""
    target = Path(path)
    made = {".svg": picture, ".json": figures}.get(target.suffix)
    if made is None:
        raise SpecError(f"{target}: the front is written as .svg or .json")
    write_picture(target, made())


def write_front(path: str | Path, points: Sequence[FrontPoint], whole: str = "batch") -> None:
    """Write a front as `.svg` or `.json`; `whole`: what the seconds are of, a batch or a job."""
    plans = [_plan_point(each) for each in points]
    save_front(path, lambda: front_svg(plans, whole, alone=True), lambda: front_json(points))


@dataclass(frozen=True)
class Picture:
    """A Gantt chart, `svg`, under its title."""

    title: str
    svg: str


def schedule_pictures(
    simulated: Simulated, devices: Sequence[str], is_job: bool = False
) -> list[Picture]:
    """A simulation as two pictures: all of it, and the turn from prefill to decode."""
    labels = [shortened(device, GANTT_LABEL) for device in devices]
    title = "The first fills of the slots" if is_job else "The whole batch"
    views = [(title, GanttOptions(width=GANTT_WIDTH))]
    turn = _turn(simulated)
    if turn is not None:
        views.append(("From prefill to decode", turn))
    return [Picture(title, gantt_svg(simulated, labels, options)) for title, options in views]


def cycle_pictures(plan: PlanSpec) -> list[Picture]:
    simulated, names = simulated_cycles(plan)
    labels = [shortened(label, GANTT_LABEL) for label in names]
    options = GanttOptions(width=GANTT_WIDTH)
    title = "Two cycles: every stage prefills, then decodes"
    if plan.prefill_plan is not None:
        title = "A few turns: some stages prefill, others decode meanwhile"
    return [Picture(title, gantt_svg(simulated, labels, options))]


def _turn(simulated: Simulated) -> GanttOptions | None:
    """A few decode rounds around the time when all slots have first tokens, if there are more."""
    decode_s = simulated.latency_s - simulated.filled_s
    steps = max(each.step for each in simulated.passes)
    if steps <= 2 * ROUNDS_SHOWN or simulated.stages == 1:
        return None
    span_s = ROUNDS_SHOWN * decode_s / steps
    start_s = max(0.0, simulated.filled_s - span_s)
    return GanttOptions(start_s, simulated.filled_s + span_s, GANTT_WIDTH)
