"""The page of a job as a browser draws it: at 400 and 1280 pixels, light and dark, by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmpq.jobs.overview.overview import overview_of
from llmpq.jobs.overview.page import write_job_page
from llmpq.jobs.overview.places import find_job
from tests.llmpq.fake_jobs import prompts, run_job, write_prompts
from tests.llmpq.made_journals import BEGAN, died, ended, failed_rows, session, write_journal
from tests.llmpq.report.browser import CONTRASTS, FOCUSED, WIDTHS, browser, page_of
from tests.llmpq.report.test_in_browser import OPEN, PICTURES, VIEWS

pytestmark = pytest.mark.rare

LONG = "a name without any space ".replace(" ", "_") * 12


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that was killed in its second session, with events and errors of long names."""
    folder = tmp_path_factory.mktemp("job")
    source = write_prompts(folder / "in.jsonl", *prompts(100))
    run_job(source, folder / "out.jsonl", limit=80)
    first = [
        *session(),
        *(died(BEGAN + 12 + second, LONG) for second in range(6)),
        failed_rows(BEGAN + 30, 3, LONG),
        ended(BEGAN + 30, "failed", LONG),
    ]
    second = session(BEGAN + 4000, resumed=40, resumed_errors=3, command=f"llmpq run {LONG}")
    write_journal(folder / "out.jsonl.job", [*first, *second])
    write_job_page(folder / "job.html", overview_of(find_job(folder / "out.jsonl")))
    return folder / "job.html"


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_nothing_overflows_and_everything_can_be_read(
    width: int, scheme: str, opened: Any, file: Path
) -> None:
    PICTURES.mkdir(exist_ok=True)
    with page_of(opened, file, width, scheme) as page:
        page.screenshot(path=PICTURES / f"jobs-{width}-{scheme}.png", full_page=True)
        for is_open in (False, True):
            page.evaluate(OPEN, is_open)
            wide, room = page.evaluate(WIDTHS)
            assert wide <= room == width
            assert page.evaluate(CONTRASTS) == []


def test_everything_is_reached_by_keyboard(opened: Any, file: Path) -> None:
    """Tab comes to the way past the top, to every event's mark, and to what scrolls or opens."""
    with page_of(opened, file, 400, "light") as page:
        page.evaluate(OPEN, True)
        wanted = page.evaluate("document.querySelectorAll('.scroll, summary, a').length")
        assert wanted > 12
        seen: dict[str, bool] = {}
        for _ in range(wanted + 1):
            page.keyboard.press("Tab")
            tag, stop, outlined = page.evaluate(FOCUSED)
            if tag == "BODY":
                break
            seen[stop] = outlined
        assert len(seen) == wanted
        assert all(seen.values())
