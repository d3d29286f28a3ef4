"""Links between pages are true: each file and each heading that is linked exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.paths import ROOT

PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"))]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
FOLDERS = ("llmpq", "actors", "planner", "quant", "benchmarks", "cluster_specs", "docs", "tests")
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
_PAGE = re.compile(r"\bdocs/[\w/]+\.(?:md|svg|png)\b")
_READ = {".py", ".toml", ".yaml", ".md", ".ipynb"}


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings, which are not repeated."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", head.lower()).strip() for head in heads)
    return {head.replace(" ", "-") for head in kept}


def is_broken(page: Path, target: str, anchor: str) -> bool:
    linked = page.parent / target if target else page
    return not linked.exists() or (bool(anchor) and anchor not in anchors(linked))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_has_its_end(page: Path) -> None:
    links = _LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if is_broken(page, *link)] == []


@pytest.mark.parametrize(
    "folder",
    ["llmpq", "actors", "planner", "quant", "benchmarks", "cluster_specs", "docs", "tests"],
)
def test_every_page_that_is_named_exists(folder: str) -> None:
    files = [file for file in (ROOT / folder).rglob("*") if file.suffix in _READ]
    named = {(file, name) for file in files for name in _PAGE.findall(file.read_text("utf-8"))}
    assert [each for each in sorted(named) if not (ROOT / each[1]).exists()] == []


def test_pages_say_which_version_they_are_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project["version"]
    for page, said in {
        "CITATION.cff": f"\nversion: {version}\n",
        "docs/README.md": f"llmpq {version};",
        "docs/installing.md": f"llmpq-{version}-py3-none-any.whl",
    }.items():
        assert said in (ROOT / page).read_text(encoding="utf-8"), page
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## (\d\S*)", changes, re.MULTILINE)
    assert released[0] == version
