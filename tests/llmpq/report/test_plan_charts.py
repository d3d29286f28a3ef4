"""Pictures of plans: points stand where their figures belong, and no text covers another."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llmpq.report.bound_charts import BOUNDS_SIZE, bounds_svg, write_latency_front
from llmpq.report.formatting import plain
from llmpq.report.page import report_page
from llmpq.report.plan_charts import QUALITY_Y, SPEED_Y, curve_of, curve_svg
from planner.plan.parts import LatencyForecast, PlanChoice, QualityChoice
from planner.plan.spec import PlanSpec
from quant.common.errors import SpecError
from tests.llmpq.bounded_plans import FRONTS, forecast
from tests.llmpq.jobs_of_prompts import CURVE, job_plan, small_plan

SVG = "{http://www.w3.org/2000/svg}"


def drawn(plan: PlanSpec) -> ElementTree.Element:
    curve = curve_of(plan)
    assert curve is not None
    return ElementTree.fromstring(str(curve_svg(curve, alone=True)))


def test_every_plan_has_a_spot_in_both_panels_with_its_figures() -> None:
    circles = drawn(job_plan()).findall(f"{SVG}circle")
    titles = [plain(each[0].text or "") for each in circles]
    assert titles[: len(titles) // 2] == titles[len(titles) // 2 :]
    # Three of the curve, the two other qualities, and last, above all, the plan itself.
    assert titles[:6] == [
        "32 in flight, 178 tokens/s, perplexity +0.2 %, 9.0 bits a layer",
        "64 in flight, 276 tokens/s, perplexity +1 %, 7.0 bits a layer",
        "128 in flight, 275 tokens/s, perplexity +27 %, 3.3 bits a layer",
        "high: 80 in flight, 281 tokens/s, perplexity +1.2 %, 6.8 bits a layer",
        "fast: 104 in flight, 310 tokens/s, perplexity +9.4 %, 4.4 bits a layer",
        "this plan and balanced: 96 in flight, 306 tokens/s, perplexity +2.1 %, 8.0 bits a layer",
    ]
    assert [each.get("r") for each in circles].count("8") == 2


def at(element: ElementTree.Element, *names: str) -> tuple[float, ...]:
    return tuple(float(element.get(name, "")) for name in names)


def test_spots_stand_in_proportion() -> None:
    """Doublings are equally wide; heights are proportional to the figures, from zero."""
    curve = curve_of(job_plan())
    assert curve is not None
    picture = drawn(job_plan())
    spots = [at(each, "cx", "cy") for each in picture.findall(f"{SVG}circle")]
    x = {plan.in_flight: spot[0] for plan, spot in zip(curve.plans, spots, strict=False)}
    assert x[64] - x[32] == pytest.approx(x[128] - x[64], abs=0.2)
    share = math.log(96 / 64) / math.log(2)
    assert x[96] - x[64] == pytest.approx(share * (x[128] - x[64]), abs=0.2)
    count = len(curve.plans)
    for panel, bottom, figure in (
        (spots[:count], SPEED_Y[0], lambda plan: plan.tokens_per_s),
        (spots[count:], QUALITY_Y[0], lambda plan: math.expm1(plan.sensitivity / 10)),
    ):
        most = max(curve.plans, key=figure)
        highest = bottom - panel[curve.plans.index(most)][1]
        for plan, (_, y) in zip(curve.plans, panel, strict=True):
            part = figure(plan) / figure(most)
            assert bottom - y == pytest.approx(part * highest, abs=0.2)
    line = picture.findall(f"{SVG}polyline")[0].get("points", "").split()
    assert [float(each.split(",")[0]) for each in line] == [x[n] for n in (32, 64, 96, 128)]


def test_numbers_of_the_axes_are_true_and_round() -> None:
    texts = [each.text for each in drawn(job_plan()).findall(f"{SVG}text")]
    title = texts.index("new tokens per second")
    assert texts[title + 1 : title + 5] == ["0", "100", "200", "300"]
    title = texts.index("more perplexity, in % (less is better)")
    assert texts[title + 1 : title + 4] == ["0", "10", "20"]
    counts = texts[: texts.index("prompts in flight")]
    assert {"32", "96", "128"} <= set(counts) <= {"32", "64", "80", "96", "104", "128"}


def crowded() -> PlanSpec:
    """Many plans that are nearly the same, all of them named."""
    plan = job_plan()
    near = tuple(PlanChoice(90 + n, 300.0 + n, 0.2, 6.0) for n in range(20))
    qualities = tuple(
        QualityChoice(name, 1.0, near[index])
        for name, index in (("high", 5), ("balanced", 6), ("fast", 7))
    )
    beside = replace(plan.beside, curve=near, qualities=qualities, quality=None)
    return replace(plan, beside=beside)


def at_the_end() -> PlanSpec:
    """The plan with the most in flight, which has all names."""
    plan = job_plan()
    every = tuple(replace(each, plan=CURVE[3]) for each in plan.beside.qualities)
    workload = replace(plan.workload, global_batch=128)
    return replace(plan, workload=workload, beside=replace(plan.beside, qualities=every))


@pytest.mark.parametrize("made", [job_plan, crowded, at_the_end])
def test_nothing_covers_anything_or_leaves_the_picture(
    made: Callable[[], PlanSpec], tmp_path: Path
) -> None:
    curve = curve_of(made())
    assert curve is not None
    picture = drawn(made())
    _, _, width, height = map(float, picture.get("viewBox", "").split())
    for circle in picture.findall(f"{SVG}circle"):
        radius = float(circle.get("r", "")) + 2
        assert radius <= float(circle.get("cx", "")) <= width - radius
        assert radius <= float(circle.get("cy", "")) <= height - radius
    boxes: list[tuple[float, float, float]] = []
    labels = 0
    for text in picture.findall(f"{SVG}text"):
        wide, anchor = 7.5 * len(text.text or ""), text.get("text-anchor", "start")
        x, y = at(text, "x", "y")
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
        assert 0 <= left <= left + wide <= width
        assert 12 <= y <= height - 4
        labels += text.get("class") == "label"
        if text.get("class") == "label" or y > QUALITY_Y[0] + 12:  # names, and prompts in flight
            for other_left, other_wide, other_y in boxes:
                apart = left >= other_left + other_wide - 0.1 or left + wide <= other_left + 0.1
                assert apart or abs(y - other_y) >= 15.9
            boxes.append((left, wide, y))
    assert labels == len(curve.named)


def test_qualities_of_the_same_plan_are_no_spots_of_their_own() -> None:
    plan = job_plan()
    every = tuple(replace(each, plan=CURVE[2]) for each in plan.beside.qualities)
    beside = replace(plan.beside, qualities=every)
    curve = curve_of(replace(plan, beside=beside))
    assert curve is not None
    assert len(curve.plans) == len(CURVE)
    assert list(curve.named.values()) == [("this plan", "high", "balanced", "fast")]


def test_plans_without_a_curve() -> None:
    plan = job_plan()
    for bare in (small_plan(), replace(plan, beside=replace(plan.beside, curve=()))):
        assert curve_of(bare) is None


def test_the_page_has_the_answers_and_the_curve() -> None:
    page = report_page(job_plan())
    section = page.partition('<section id="menu"')[2].partition("</section>")[0]
    assert "16 min 20 s at 306 tokens/s" in section
    assert section.count("<dt>") == 5
    assert section.count("<svg") == 1
    assert "<rect" not in section  # the page's own colours show through
    # The menu has the plan, two qualities, 16 bit and two devices; the curve six plans.
    assert section.count("<tr") == (1 + 6) + (1 + 6)
    assert "prompts in flight</dt><dd>96<" in page.partition("<main")[0]
    assert "<svg" not in report_page(small_plan())


def test_each_kind_has_a_line_of_its_points(tmp_path: Path) -> None:
    write_latency_front(tmp_path / "front.svg", FRONTS)
    picture = ElementTree.parse(tmp_path / "front.svg").getroot()
    lines = picture.findall(f"{SVG}polyline")
    assert [len((line.get("points") or "").split()) for line in lines] == [3, 3]
    assert len({line.get("stroke-dasharray") for line in lines}) == 2
    titles = [plain(each[0].text or "") for each in picture.findall(f"{SVG}circle")]
    assert titles[0] == "RRA within 4.00 s: 2.2 requests/s, 3.60 s"
    assert titles[-1] == "WAA-C within 23.00 s: 4.2 requests/s, 20.70 s"


def test_higher_is_more_and_further_right_is_looser() -> None:
    picture = ElementTree.fromstring(str(bounds_svg(FRONTS)))
    spots = [at(each, "cx", "cy") for each in picture.findall(f"{SVG}circle")]
    points = [point for kind in FRONTS.kinds for point in FRONTS.front(kind)]
    drawn = list(zip(points, spots, strict=True))
    for (one, (x, y)), (other, (other_x, other_y)) in itertools.combinations(drawn, 2):
        assert (y - other_y) * (one.requests_per_s - other.requests_per_s) <= 0
        assert (x - other_x) * (one.bound_s - other.bound_s) >= 0
    assert all(0 <= x <= BOUNDS_SIZE[0] for x, _ in spots)
    texts = picture.findall(f"{SVG}text")
    labels = sorted(at(each, "y") for each in texts if each.get("class") == "label")
    assert all(b[0] - a[0] >= 16 for a, b in itertools.pairwise(labels))
    assert [each.text for each in texts][:4] == ["2", "4", "20", "60"]


@pytest.mark.parametrize("bound_s", [1.0, 20.0, 90.0, None])
def test_the_plan_of_the_page_has_a_ring_within_the_picture(bound_s: float | None) -> None:
    def rings(present: LatencyForecast | None) -> list[ElementTree.Element]:
        picture = ElementTree.fromstring(str(bounds_svg(FRONTS, present)))
        return [each for each in picture.findall(f"{SVG}circle") if each.get("class") == "here"]

    (ring,) = rings(forecast(bound_s))
    x, y = at(ring, "cx", "cy")
    assert 74 <= x <= BOUNDS_SIZE[0] - 84
    assert 44 <= y <= BOUNDS_SIZE[1] - 62
    assert rings(None) == []


def test_figures_as_json_and_other_endings(tmp_path: Path) -> None:
    write_latency_front(tmp_path / "front.json", FRONTS)
    found = json.loads((tmp_path / "front.json").read_text())
    assert [each["bound_s"] for each in found["points"]] == [4.0, 20.0, 60.0, 2.0, 5.0, 23.0]
    assert found["points"][0]["schedule"]["kind"] == "rra"
    assert found["left_out"][0]["kind"] == "waa-m"
    with pytest.raises(SpecError, match=r"front\.png: the front is written as \.svg or \.json"):
        write_latency_front(tmp_path / "front.png", FRONTS)
