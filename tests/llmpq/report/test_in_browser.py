"""The pages as a browser draws them: at 400 and 1280 pixels, light and dark, by keyboard.

The pictures stay in `report_pictures/`, or where LLMPQ_REPORT_PICTURES says, to be looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmpq import Plan
from llmpq.cli import plan as plan_cli
from llmpq.report.page import report_page
from llmpq.report.plan_charts import curve_of, curve_svg, write_front
from planner.explanation.what_if import WhatIfOptions
from planner.search.find import FrontPoint
from tests.llmpq.jobs_of_prompts import job_plan
from tests.llmpq.report.browser import CONTRASTS, FOCUSED, WIDTHS, browser, page_of
from tests.llmpq.report.test_plan_tables import eight_stages
from tests.llmpq.report.test_same_figures import demo_job, two_types
from tests.paths import ROOT

pytestmark = pytest.mark.rare

FEW = WhatIfOptions(budget_s=5.0)
PICTURES = Path(os.environ.get("LLMPQ_REPORT_PICTURES", ROOT / "report_pictures"))
VIEWS = [(width, scheme) for width in (400, 1280) for scheme in ("light", "dark")]
MOST_STOPS = 400
NAMES = ("job", "batch", "bare", "long", "refusal")
OPEN = "open => document.querySelectorAll('details').forEach(each => each.open = open)"


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of a job, of a batch, without reasons, with long names, and of a refusal."""
    folder = tmp_path_factory.mktemp("pages")
    written = {name: folder / f"{name}.html" for name in NAMES}
    for name, plan in (("job", demo_job()), ("batch", two_types())):
        explained = Plan(plan.spec, plan.costs)
        explained.__dict__["explanation"] = plan.explain(FEW)
        explained.report(written[name])
    Plan(job_plan()).report(written["bare"])
    long, _ = eight_stages("rack-7-of-building-2", (16, 8, 4, 3))
    written["long"].write_text(report_page(long))
    short = ["--model", "opt-66b", "--device_names", "T4", "--device_numbers", "2"]
    assert plan_cli.main([*short, "--global_bz", "1", "--report", str(written["refusal"])]) == 2
    return written


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_nothing_overflows_and_everything_can_be_read(
    name: str, width: int, scheme: str, opened: Any, pages: dict[str, Path]
) -> None:
    PICTURES.mkdir(exist_ok=True)
    with page_of(opened, pages[name], width, scheme) as page:
        page.screenshot(path=PICTURES / f"{name}-{width}-{scheme}.png", full_page=True)
        for is_open in (False, True):
            page.evaluate(OPEN, is_open)
            wide, room = page.evaluate(WIDTHS)
            assert wide <= room == width
            assert page.evaluate(CONTRASTS) == []
        for gantt in page.query_selector_all(".gantt"):
            inside, seen, overflow = gantt.evaluate(
                "e => [e.scrollWidth, e.clientWidth, getComputedStyle(e).overflowX]"
            )
            assert overflow == "auto"
            assert (inside > seen) == (width == 400)


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_reached_by_keyboard(name: str, opened: Any, pages: dict[str, Path]) -> None:
    """Tab comes to every box that scrolls and to every summary, Enter opens the reasons."""
    with page_of(opened, pages[name], 400, "light") as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "content"
        for summary in page.query_selector_all("summary"):
            summary.focus()
            page.keyboard.press("Enter")
        assert page.evaluate("document.querySelectorAll('details:not([open])').length") == 0
        sentences = page.query_selector_all(".stage .sentences li")
        assert all(each.is_visible() for each in sentences)
        assert bool(sentences) == (name in ("job", "batch"))
    with page_of(opened, pages[name], 400, "light") as page:
        page.evaluate(OPEN, True)
        wanted = page.evaluate("document.querySelectorAll('.scroll, summary, a').length")
        seen = {}
        for _ in range(MOST_STOPS):
            page.keyboard.press("Tab")
            tag, stop, outlined = page.evaluate(FOCUSED)
            if tag == "BODY" or stop in seen:
                break
            seen[stop] = outlined
        assert len(seen) == wanted
        assert all(seen.values())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_by_themselves_have_a_ground_and_can_be_read(
    scheme: str, opened: Any, tmp_path: Path
) -> None:
    PICTURES.mkdir(exist_ok=True)
    points = [
        FrontPoint(theta, 2.0 + theta, 1.0, 90.0, 8, 1.0 / (1 + theta), 6.0) for theta in range(4)
    ]
    write_front(tmp_path / "front.svg", points)
    curve = curve_of(job_plan())
    assert curve is not None
    (tmp_path / "curve.svg").write_text(curve_svg(curve, alone=True))
    two_types().trace(tmp_path / "trace.svg")
    grounds = set()
    for name in ("front", "curve", "trace"):
        with page_of(opened, tmp_path / f"{name}.svg", 1280, scheme) as page:
            page.screenshot(path=PICTURES / f"{name}-{scheme}.png")
            assert page.evaluate(CONTRASTS) == []
            ground = "getComputedStyle(document.querySelector('.ground')).fill"
            grounds.add(page.evaluate(ground))
    assert grounds == {"rgb(255, 255, 255)" if scheme == "light" else "rgb(28, 32, 38)"}


def test_a_printed_page_is_dark_on_white(opened: Any, pages: dict[str, Path]) -> None:
    with page_of(opened, pages["batch"], 1280, "light") as page:
        page.emulate_media(media="print")
        assert (
            page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        )
        assert page.evaluate(CONTRASTS) == []
