"""The page on Python and the notebook do what they say, on the demo model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

pytestmark = [
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.rare,  # `test_session.py` has the same calls, `test_views.py` what is shown
]


def run_all(codes: list[str]) -> dict[str, Any]:
    """Run pieces of code one after another as one program; returns its names."""
    names: dict[str, Any] = {}
    for code in codes:
        exec(compile(code, "<example>", "exec"), names)
    return names


def test_the_pages_examples_are_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("examples", "cluster_specs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    names = run_all(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    assert (tmp_path / "plan.html").is_file()
    assert list(names["table"]["custom_id"]) != []
    assert len(names["answers"]) == 2
    assert len(names["joined"]) == 2


def test_the_notebooks_cells_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = [each for each in notebook["cells"] if each["cell_type"] == "code"]
    names = run_all(["".join(each["source"]) for each in cells])
    assert names["session"].is_closed
    assert names["answers"].summary.errors == 0
    kept = [output for each in cells for output in each["outputs"]]
    assert any("text/html" in output["data"] for output in kept), "what it shows is kept"
