"""The map of the house is true: every path in it exists, and every room is on it."""

from __future__ import annotations

import re

import pytest

from tests.paths import ROOT

PACKAGES = ("llmpq", "actors", "planner", "quant")
MAP = ROOT / "docs" / "architecture.md"
_PATH = re.compile(
    r"`((?:llmpq|actors|planner|quant|tests|benchmarks|docs|examples|cluster_specs)/[^\s`]*)`"
)


def rooms() -> list[str]:
    """Every folder of the four packages that holds code."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return sorted({file.parent.relative_to(ROOT).as_posix() for file in files})


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_path_exists(page: str) -> None:
    named = _PATH.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_room_is_on_the_map() -> None:
    text = MAP.read_text(encoding="utf-8")
    inner = [room for room in rooms() if room not in PACKAGES]
    assert [room for room in inner if f"`{room}/" not in text] == []


def test_twenty_five_questions_are_answered() -> None:
    table = MAP.read_text(encoding="utf-8").partition("## Where do I")[2]
    rows = [row for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(rows) >= 25
    assert all(_PATH.search(row) for row in rows)


def test_the_picture_shows_what_its_source_says() -> None:
    source = (ROOT / "docs" / "architecture.dot").read_text(encoding="utf-8")
    picture = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    drawn = set(re.findall(r"<title>([^<]+)</title>", picture))
    visible = source.partition("// where the other rooms stand")[0]
    arrows = re.findall(r"(\w+) -> (\w+)", visible)
    assert arrows
    assert [f"{a}->{b}" for a, b in arrows if f"{a}&#45;&gt;{b}" not in drawn] == []
    shown = {room.split("/")[1] for room in rooms() if "/" in room}
    assert [room for room in sorted(shown) if f">{room}<" not in picture] == []
