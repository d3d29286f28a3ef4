"""The page of a plan under a bound on latency: both plans, the schedule over time, the curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmpq import Plan
from llmpq.report.answers import job_answers
from llmpq.report.page import report_page
from planner.plan.parts import PlanChoice, PlansBeside, QualityChoice
from planner.plan.spec import PlanSpec
from tests.llmpq.bounded_plans import FRONTS, rra_plan, waa_plan
from tests.llmpq.report.pages import Page


@pytest.mark.parametrize("made", [rra_plan, waa_plan], ids=["rra", "waa"])
def test_every_stage_of_both_plans_is_on_the_page(made: Callable[[], PlanSpec]) -> None:
    plan = made()
    page = Page(report_page(plan, None, FRONTS))
    stages = plan.stages + (plan.prefill_plan.stages if plan.prefill_plan else ())
    assert len(page.all_of("li", "card")) == len(stages)
    for stage in stages:
        assert stage.device in page.text
    boxes = Counter(each["class"] for each in page.all_of("li", "box"))
    assert sum(boxes.values()) == sum(len(stage.layers) for stage in stages)
    identifiers = [each["id"] for name, each in page.elements if name == "section"]
    assert len(identifiers) == len(set(identifiers))
    assert "It keeps the bound." in page.text


def test_plans_of_other_qualities_are_in_the_menu_and_in_the_terminal() -> None:
    """With what gives each, and without the seconds of a job, which is not what was asked for."""
    qualities = [QualityChoice("balanced", 1.0, FEW_BITS), QualityChoice("fast", 0.0, FASTER)]
    plan = rra_plan()
    beside = replace(plan.beside, quality="balanced", qualities=tuple(qualities))
    plan = replace(plan, beside=beside, quality=None)
    page = Page(report_page(plan)).text
    for told in ("Plans to choose from", "this plan (balanced)", "--quality fast", "4,321"):
        assert told in page
    assert "quality: balanced (taken) 1,234 tokens/s, sensitivity 0.5; fast 4,321, 2" in [
        answer for _, answer in job_answers(plan)
    ]
    menu = page[page.index("Plans to choose from") : page.index("--quality fast")]
    assert "request" not in menu
    alone = replace(rra_plan(), beside=PlansBeside())
    assert "Plans to choose from" not in Page(report_page(alone)).text


FEW_BITS, FASTER = PlanChoice(40, 1234.0, 0.5, 8.0), PlanChoice(60, 4321.0, 2.0, 4.0)


def test_roles_are_told_where_stages_have_them() -> None:
    page = Page(report_page(waa_plan())).text
    assert "Stages that prefill" in page
    assert "Stages that decode" in page
    assert "by way of the host" in page
    assert "Stages that prefill" not in Page(report_page(rra_plan())).text


def test_the_curve_is_there_where_it_is_known() -> None:
    with_curve = Page(report_page(rra_plan(), None, FRONTS))
    assert "Throughput over bounds" in with_curve.text
    assert "From 5.00 s to 20.00 s: WAA-C, its decode steps wait for no prefill" in with_curve.text
    assert "No WAA-M: two copies need 3.1 GiB more." in with_curve.text
    assert len(with_curve.all_of("polyline")) == 2
    assert "Throughput over bounds" not in Page(report_page(rra_plan())).text


def test_a_plan_that_was_loaded_has_the_same_page_and_a_picture(tmp_path: Path) -> None:
    plan = Plan(waa_plan())
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    loaded.report(tmp_path / "page.html")
    text = Page((tmp_path / "page.html").read_text(encoding="utf-8")).text
    assert "WAA-C: 1 stage prefills" in text
    loaded.trace(tmp_path / "cycles.svg")
    assert "decode, " in (tmp_path / "cycles.svg").read_text()
    assert loaded.limits == ()
    assert "5.25 requests/s" in repr(loaded)
    assert "svg" in loaded._repr_html_()
