"""The live pages as a browser draws them, and as it changes them while a job goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from llmpq.jobs.overview.live import REFRESH_S, JobServer
from tests.llmpq.jobs.overview.test_live import make_jobs, served
from tests.llmpq.made_journals import BEGAN, ended, session, write_journal
from tests.llmpq.report.browser import CONTRASTS, WIDTHS, browser, page_of
from tests.llmpq.report.test_in_browser import PICTURES, VIEWS

pytestmark = pytest.mark.rare

JOB = "job?name=out.jsonl.job"
LONG = "a_name_without_any_space" * 5


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[JobServer]:
    top = make_jobs(tmp_path / "outputs")
    copytree(top / "out.jsonl.job", top / f"{LONG}.jsonl.job")
    with served(top) as found:
        yield found


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("path", ["", JOB])
def test_nothing_overflows_and_everything_can_be_read(
    width: int, scheme: str, path: str, opened: Any, server: JobServer
) -> None:
    PICTURES.mkdir(exist_ok=True)
    said: list[str] = []
    with page_of(opened, server.address + path, width, scheme) as page:
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        name = "job" if path else "list"
        page.screenshot(path=PICTURES / f"live-{name}-{width}-{scheme}.png", full_page=True)
        wide, room = page.evaluate(WIDTHS)
        assert wide <= room == width
        assert page.evaluate(CONTRASTS) == []
        assert "80 of 100" in page.content() if path else "80/100" in page.content()
        look_again(page)
        assert page.locator("#gone").is_hidden()
        assert said == []


def look_again(page: Any) -> None:
    """Let the script's time come, and wait for its answer."""
    with page.expect_response("**/*"):
        page.clock.run_for(1000 * REFRESH_S + 1)
    page.wait_for_timeout(50)


def test_a_page_changes_where_its_job_does_and_stays_where_it_was_read(
    opened: Any, server: JobServer
) -> None:
    with page_of(opened, server.address + JOB, 400, "light") as page:
        page.evaluate("document.querySelector('details').open = true")
        page.evaluate("document.querySelector('summary').focus()")
        page.evaluate("document.querySelector('#stages').kept = 7; scrollTo(0, 600)")
        assert page.title() == "out.jsonl: stopped"
        records = server.folder.top / "out.jsonl.job"
        write_journal(records, [*session(rows=90), ended(BEGAN + 31, "failed", "other words")])
        look_again(page)
        page.wait_for_function("document.body.textContent.includes('other words')")
        assert page.evaluate("document.querySelector('details').open")
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        assert page.evaluate("scrollY") == 600
        assert page.evaluate("document.querySelector('#stages').kept") == 7
        server.server_close()
        server.shutdown()
        page.clock.run_for(1000 * REFRESH_S + 1)
        page.wait_for_selector("#gone", state="visible")


def test_without_scripts_it_is_the_same_page(opened: Any, server: JobServer) -> None:
    with page_of(opened, server.address, 400, "light", scripts=False) as page:
        assert "80/100" in page.content()
        assert page.locator("noscript meta").count() == 1
