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
from llmpq.jobs.overview.places import find_job
from llmpq.jobs.overview.sentences import facts
from llmpq.jobs.overview.text import job_text, list_text
from llmpq.jobs.page.charts import rate_chart, rows_chart
from llmpq.jobs.page.page import job_page, write_page
from llmpq.jobs.page.time_axis import MOST_TICKS, TimeAxis
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
    assert [fact.name for fact in told] == [
        "model", "plan", "rows", "tokens", "tokens/s", "time", "predicted", "measured",
    ]  # fmt: skip
    for fact in told:
        assert fact.text.replace(SPACE, " ") in page
        assert fact.text.replace(SPACE, " ") in terminal
    for number in ("25.00 ms", "30.00 ms", "~12.00 ms", "50 %", "2.5 s"):
        assert number in page
        assert number in terminal


def test_curves_lie_where_the_figures_say(tmp_path: Path) -> None:
    """40 tokens/s in both sessions, as planned; rows from 0 to 40 and from 40 to 100."""
    job = job_of(tmp_path, eventful())
    rates, rows = rate_chart(job), rows_chart(job)
    assert rates is not None
    assert rows is not None
    heights = {round(y, 3) for curve in rates.measured[:1] for _, y in curve}
    assert heights == {round(rates.axis.at(40), 3)}
    assert {round(y, 3) for curve in rates.planned for _, y in curve} == heights
    (first, second) = rows.measured
    assert first[0] == (rows.time.at(10), rows.axis.at(0))
    assert second[-1] == (pytest.approx(rows.time.at(60)), rows.axis.at(100))
    assert rows.whole == (rows.axis.at(100), "all 100")
    begin, end = rows.planned[0]  # 100 rows in 50 s
    assert begin == (rows.time.at(10), rows.axis.at(0))
    assert end == (rows.time.at(30), pytest.approx(rows.axis.at(40)))
    assert [mark.number for mark in rates.marks] == [1, 2]
    assert rates.marks[0].x == rates.time.at(14)
    assert rates.begins == [rates.time.at(30)]


@pytest.mark.parametrize("length_s", [0.5, 4, 59, 61, 600, 3000, 86400, 9e5, 3e7])
def test_ticks_are_round_and_few(length_s: float) -> None:
    ticks = TimeAxis(length_s, 0, 500).ticks
    assert 1 <= len(ticks) <= MOST_TICKS + 1
    assert ticks[0] == (0, "0")
    assert len({text for _, text in ticks}) == len(ticks)
    assert all(0 <= at <= 500 for at, _ in ticks)


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
            write_page(target, job)
