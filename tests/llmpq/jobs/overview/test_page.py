"""The page of a job as a browser would take it apart: whole, escaped, and as the terminal says."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from llmpq.jobs.journal import Entry
from llmpq.jobs.overview.overview import JobOverview, overview_of
from llmpq.jobs.overview.page import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    job_page,
    rate_chart,
    rows_chart,
    write_job_page,
)
from llmpq.jobs.overview.places import find_job
from llmpq.jobs.overview.words import facts, job_text, list_text
from llmpq.report.formatting import SPACE
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import prompts, run_job, write_prompts
from tests.llmpq.made_journals import (
    BEGAN,
    PLAN,
    START,
    died,
    ended,
    failed_rows,
    session,
    write_journal,
)
from tests.llmpq.report.pages import Page

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert('1')</script>\"><img src=x onerror=alert(1)>&amp;"


def job_of(folder: Path, entries: list[Entry], **done: int) -> JobOverview:
    """A job of 100 rows with this journal, of which some are on disk."""
    source = write_prompts(folder / "in.jsonl", *prompts(100))
    run_job(source, folder / "out.jsonl", limit=done.get("limit"))
    write_journal(folder / "out.jsonl.job", entries)
    return overview_of(find_job(folder / "out.jsonl"), BEGAN + 9000)


def eventful() -> list[Entry]:
    first = [
        *session(),
        died(BEGAN + 14),
        died(BEGAN + 22, HOSTILE),
        failed_rows(BEGAN + 30, 3, HOSTILE),
        ended(BEGAN + 30, "failed", HOSTILE),
    ]
    second = session(BEGAN + 4000, rows=60, resumed=40, command=f"llmpq run {HOSTILE}")
    return [*first, *second, ended(BEGAN + 4031)]


def in_terminal(job: JobOverview) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(job_text(job))
    console.print(list_text([job]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    return str(text)


def test_a_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    text = job_page(job_of(tmp_path, eventful()))
    page = Page(text)
    assert text.lstrip().lower().startswith("<!doctype html>")
    assert "<script" not in text
    assert "onerror=alert(1)>" not in text.replace("&gt;", "")
    links = [attributes.get(key) for _, attributes in page.elements for key in ("src", "href")]
    assert {link for link in links if link} == {"#content", "#events"}
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)", text)
    assert page.text.count("alert('1')") >= 4  # shown as text: event, error, end, command
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 2
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.get("viewBox")
    identifiers = [found["id"] for _, found in page.elements if found.get("id")]
    assert len(identifiers) == len(set(identifiers))


def test_page_and_terminal_have_the_same_numbers(tmp_path: Path) -> None:
    job = job_of(tmp_path, eventful())
    page = Page(job_page(job)).text
    terminal = " ".join(in_terminal(job).split())
    told = [*facts(job)]
    assert [name for name, _ in told] == [
        "model", "plan", "rows", "tokens", "tokens/s", "time", "predicted", "measured",
    ]  # fmt: skip
    for _, text in told:
        assert text.replace(SPACE, " ") in page
        assert text.replace(SPACE, " ") in terminal
    for number in ("25.00 ms", "30.00 ms", "~12.00 ms", "50 %", "2.5 s"):
        assert number in page
        assert number in terminal


def test_curves_lie_where_the_figures_say(tmp_path: Path) -> None:
    """40 tokens/s in both sessions, as planned; rows from 0 to 40 and from 40 to 100."""
    job = job_of(tmp_path, eventful())
    rates, rows = (ElementTree.fromstring(str(made(job))) for made in (rate_chart, rows_chart))

    def curves(chart: ElementTree.Element, style: str) -> list[list[tuple[float, float]]]:
        found = [each for each in chart.iter(f"{SVG}polyline") if each.get("class") == style]
        pixels = [[each.split(",") for each in (one.get("points") or "").split()] for one in found]
        return [[(float(x), float(y)) for x, y in one] for one in pixels]

    def x_of(seconds: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * seconds / job.seconds, 1)

    def y_of(value: float, most: float) -> float:
        return round(BOTTOM + (TOP - BOTTOM) * value / (1.12 * most), 1)

    speed = {y for _, y in curves(rates, "front")[0]}
    assert len(speed) == 1
    assert {y for one in curves(rates, "planned") for _, y in one} == speed
    first, second = curves(rows, "front")
    assert first[0] == (x_of(10), y_of(0, 100))
    assert second[-1] == pytest.approx((x_of(60), y_of(100, 100)))
    begin, end = curves(rows, "planned")[0]  # 100 rows in 50 s
    assert begin == (x_of(10), y_of(0, 100))
    assert end == (x_of(30), y_of(40, 100))
    (whole,) = [each for each in rows.iter(f"{SVG}line") if each.get("class") == "whole"]
    assert float(whole.get("y1", "")) == y_of(100, 100)
    assert [each.text for each in rates.iter(f"{SVG}text") if each.get("class") == "event"] == [
        "1",
        "2",
    ]
    (begins,) = [each for each in rates.iter(f"{SVG}line") if each.get("class") == "begins"]
    assert float(begins.get("x1", "")) == x_of(30)


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [START],
        session()[:2],
        session()[:3],
        session(rows=0),
        session(plan=replace(PLAN, seconds=None, prompts=None, tokens_per_s=None, stages=())),
    ],
)
def test_however_little_is_known(tmp_path: Path, entries: list[Entry]) -> None:
    job = job_of(tmp_path, entries, limit=2)
    Page(job_page(job))
    assert "stopped" in in_terminal(job)


def test_a_page_that_loads_itself_again(tmp_path: Path) -> None:
    job = job_of(tmp_path, eventful())
    assert 'http-equiv="refresh" content="5"' in job_page(job, 5.2)
    assert "refresh" not in job_page(job)


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    job = job_of(tmp_path, [])
    for target in (tmp_path / "none" / "page.html", tmp_path, Path("/dev/null/x"), Path("")):
        with pytest.raises(InputError, match="cannot write the page"):
            write_job_page(target, job)
