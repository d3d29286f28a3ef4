"""Names and messages are only shown: no markup, no control of the terminal (docs/security.md)."""

from __future__ import annotations

import json
import warnings
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llmpq import Plan
from llmpq.cli.common import EXIT_BAD_INPUT, console, run_command
from llmpq.jobs.inputs import JobInput
from llmpq.report.page import report_page
from llmpq.report.plan_tables import comparison_table, plan_table
from llmpq.rows.row import Row
from quant.common.errors import DeviceError, LlmpqError, SpecError
from tests.llmpq.hostile import ESCAPES, HOSTILE_TEXTS, with_texts
from tests.llmpq.jobs_of_prompts import job_plan


class Tags(HTMLParser):
    """Elements with the names of their attributes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))


def tags_of(page: str) -> list[tuple[str, tuple[str, ...]]]:
    parser = Tags()
    parser.feed(page)
    return parser.found


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
@pytest.mark.parametrize("is_job", [True, False])
def test_the_report_has_no_markup_of_others(text: str, is_job: bool, plan: Plan) -> None:
    spec = job_plan() if is_job else plan.spec
    page = report_page(with_texts(spec, text))
    plain = report_page(with_texts(spec, "name"))
    assert tags_of(page) == tags_of(plain)
    assert len(page) > len(plain)


@pytest.mark.parametrize("text", HOSTILE_TEXTS[:3])
def test_the_gantt_picture_has_no_markup_of_others(text: str, plan: Plan, tmp_path: Path) -> None:
    from planner.simulation.pictures import write_gantt
    from tests.planner.simulation.test_trace import simulated  # type: ignore[attr-defined]

    result = simulated()
    write_gantt(tmp_path / "a.svg", result, [text] * result.stages)
    write_gantt(tmp_path / "b.svg", result, ["name"] * result.stages)
    hostile, plain = (
        [element.tag for element in ElementTree.parse(tmp_path / name).iter()]
        for name in ("a.svg", "b.svg")
    )
    assert hostile == plain


@pytest.mark.parametrize("is_terminal", [True, False])
def test_names_cannot_drive_the_terminal(
    is_terminal: bool,
    plan: Plan,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    hostile = with_texts(plan.spec, f"[red]{ESCAPES}[/]")
    console().print(plan_table(hostile), comparison_table(hostile))
    console().print(plan_table(with_texts(job_plan(), f"[red]{ESCAPES}[/]")))
    console().print(f"row {ESCAPES!s} failed", soft_wrap=True)
    printed = capsys.readouterr().out
    assert "[red]" in printed
    assert not any(each in printed for each in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e", "\r"))
    assert ("\x1b[" in printed) == is_terminal  # Rich's own colours go through


@pytest.mark.parametrize("kind", [LlmpqError, SpecError, DeviceError])
def test_messages_cannot_drive_the_terminal(
    kind: type[LlmpqError], capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> int:
        raise kind(f"node {ESCAPES}{'x' * 100_000} is bad; remedy")

    assert run_command("llmpq-x", fails) == EXIT_BAD_INPUT
    printed = capsys.readouterr().err
    assert not any(each in printed for each in "\x1b\x07\x9b\u202e\r")
    assert "\\x1b[2J" in printed
    assert printed.endswith("is bad; remedy\n")
    assert len(printed) < 2000


def test_rows_of_hostile_names(tmp_path: Path) -> None:
    """An id is given back as it is, in JSON, where it is harmless."""
    (tmp_path / "in.jsonl").write_text(json.dumps({"custom_id": ESCAPES, "prompt": "x"}) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ((row, _),) = JobInput.find([tmp_path / "in.jsonl"]).rows()
    assert isinstance(row, Row)
    assert row.custom_id == ESCAPES
