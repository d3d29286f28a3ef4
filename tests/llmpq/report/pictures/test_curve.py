"""The curve of a job: plans stand where their figures belong, and no text covers another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llmpq.report import report_page, write_curve
from llmpq.report.pictures.curve import JobCurve, curve_of
from planner.plan.spec import PlanChoice, PlanSpec, QualityChoice
from quant.common.errors import SpecError
from tests.llmpq.jobs_of_prompts import CURVE, job_plan, small_plan

SVG = "{http://www.w3.org/2000/svg}"


def curve(plan: PlanSpec) -> JobCurve:
    found = curve_of(plan)
    assert found is not None
    return found


def drawn(plan: PlanSpec, tmp_path: Path) -> ElementTree.Element:
    write_curve(tmp_path / "curve.svg", plan)
    return ElementTree.parse(tmp_path / "curve.svg").getroot()


def test_every_plan_has_a_spot_in_both_panels_with_its_figures(tmp_path: Path) -> None:
    circles = drawn(job_plan(), tmp_path).findall(f"{SVG}circle")
    titles = [each[0].text or "" for each in circles]
    assert titles[: len(titles) // 2] == titles[len(titles) // 2 :]
    # Three of the curve, the two other qualities, and last, above all, the plan itself.
    assert titles[:6] == [
        "32 in flight, 178 tokens/s, sensitivity 0.02, 9.0 bits a layer",
        "64 in flight, 276 tokens/s, sensitivity 0.1, 7.0 bits a layer",
        "128 in flight, 275 tokens/s, sensitivity 2.4, 3.3 bits a layer",
        "high: 80 in flight, 281 tokens/s, sensitivity 0.12, 6.8 bits a layer",
        "fast: 104 in flight, 310 tokens/s, sensitivity 0.9, 4.4 bits a layer",
        "this plan and balanced: 96 in flight, 306 tokens/s, sensitivity 0.21, 8.0 bits a layer",
    ]
    assert [each.get("r") for each in circles].count("8") == 2


def test_spots_stand_in_proportion(tmp_path: Path) -> None:
    """Doublings are equally wide; heights are proportional to the figures, from zero."""
    found = curve(job_plan())
    x = {spot.plan.in_flight: spot.x for spot in found.spots}
    assert x[64] - x[32] == pytest.approx(x[128] - x[64])
    share = math.log(96 / 64) / math.log(2)
    assert x[96] - x[64] == pytest.approx(share * (x[128] - x[64]))
    bottoms = {"speed_y": found.speed.first, "quality_y": found.quality.first}
    for key, figure in (("speed_y", "tokens_per_s"), ("quality_y", "sensitivity")):
        scales = {
            round((bottoms[key] - getattr(spot, key)) / getattr(spot.plan, figure), 6)
            for spot in found.spots
        }
        assert len(scales) == 1
        assert min(scales) > 0
    line = drawn(job_plan(), tmp_path).findall(f"{SVG}polyline")[0].get("points", "").split()
    assert [each.split(",")[0] for each in line] == [f"{x[n]:.1f}" for n in (32, 64, 96, 128)]


def test_numbers_of_the_axes_are_true_and_round() -> None:
    found = curve(job_plan())
    assert [text for _, text in found.speed.ticks] == ["0", "100", "200", "300"]
    assert [text for _, text in found.quality.ticks] == ["0", "1", "2"]
    for axis in (found.speed, found.quality):
        assert all(axis.at(float(text)) == pytest.approx(pixel) for pixel, text in axis.ticks)
    assert {text for _, text in found.ticks} <= {"32", "64", "80", "96", "104", "128"}
    assert {"32", "96", "128"} <= {text for _, text in found.ticks}


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
    found = curve(made())
    assert len(found.labels) == len([spot for spot in found.spots if spot.names])
    assert found.labels
    for one, other in itertools.combinations(found.labels, 2):
        assert not one.overlaps(other)
    ticks = [pixel for pixel, _ in found.ticks]
    assert all(b - a >= 40 for a, b in itertools.pairwise(ticks))
    picture = drawn(made(), tmp_path)
    _, _, width, height = map(float, picture.get("viewBox", "").split())
    for circle in picture.findall(f"{SVG}circle"):
        radius = float(circle.get("r", "")) + 2
        assert radius <= float(circle.get("cx", "")) <= width - radius
        assert radius <= float(circle.get("cy", "")) <= height - radius
    for text in picture.findall(f"{SVG}text"):
        wide, anchor = 7.5 * len(text.text or ""), text.get("text-anchor", "start")
        left = float(text.get("x", "")) - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
        assert 0 <= left <= left + wide <= width
        assert 12 <= float(text.get("y", "")) <= height - 4


def test_qualities_of_the_same_plan_are_no_spots_of_their_own() -> None:
    plan = job_plan()
    every = tuple(replace(each, plan=CURVE[2]) for each in plan.beside.qualities)
    beside = replace(plan.beside, qualities=every)
    spots = curve(replace(plan, beside=beside)).spots
    assert len(spots) == len(CURVE)
    assert [spot.names for spot in spots if spot.names] == [
        ("this plan", "high", "balanced", "fast")
    ]


def test_a_plan_without_a_curve_is_refused(tmp_path: Path) -> None:
    plan = job_plan()
    for bare, why in (
        (small_plan(), "is of one batch"),
        (replace(plan, beside=replace(plan.beside, curve=())), "was made for one number in flight"),
    ):
        assert curve_of(bare) is None
        with pytest.raises(SpecError, match=rf"c\.svg: the plan {why}.*--in_flight auto"):
            write_curve(tmp_path / "c.svg", bare)
    with pytest.raises(SpecError, match=r"written as \.svg"):
        write_curve(tmp_path / "c.png", plan)
    with pytest.raises(SpecError, match="cannot write"):
        write_curve(tmp_path / "no" / "c.svg", plan)
    assert list(tmp_path.iterdir()) == []


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
