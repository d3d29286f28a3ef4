"""What does not fit has a page too: what is short, and every remedy of the message."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.cli import plan as plan_cli
from tests.llmpq.report.pages import Page, measures

NO_ROOM = ["--model", "opt-66b", "--device_names", "T4", "--device_numbers", "2", "--theta", "1"]


def refused(words: list[str], target: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """The text of the page and the message of the refusal."""
    assert plan_cli.main([*words, "--report", str(target)]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    told, _, message = error.partition("llmpq-algo: error: ")
    assert told == f"wrote {target}; it says what would help\n"
    return Page(target.read_text(encoding="utf-8")).text, message


def test_what_does_not_fit_says_what_is_short_and_what_would_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*NO_ROOM, "--global_bz", "1", "--s", "64", "--n", "8"]
    page, message = refused(words, tmp_path / "no.html", capsys)
    assert "It does not fit." in page
    problem, _, remedies = message.rstrip().partition(". It would fit with ")
    for part in (problem, *remedies.split(", or ")):
        assert "".join(part.split()) in "".join(page.split())
    assert measures(message) <= measures(page)
    assert "3 bit" in page
    assert f"llmpq plan {' '.join(words)}" in page


def test_a_bound_that_no_plan_keeps_has_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "opt-125m", "--device_names", "T4", "--device_numbers", "1"]
    small = ["--global_bz", "2", "--s", "16", "--n", "4", "--max_latency_s", "0.0001"]
    page, message = refused([*words, *small], tmp_path / "no.html", capsys)
    assert "No plan keeps the bound." in page
    assert "--max_latency_s" in page
    assert "It does not fit" not in page
    assert message.count("--max_latency_s")


def test_without_a_report_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan_cli.main([*NO_ROOM, "--global_bz", "1", "--s", "64", "--n", "8"]) == 2
    assert "does not fit" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
