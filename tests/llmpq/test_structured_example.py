"""The example of structured answers says what it prints: forms and a call, on the demo model."""

from __future__ import annotations

import runpy

import pytest

from tests.paths import EXAMPLES


@pytest.mark.usefixtures("local_ray")
def test_every_answer_has_its_form(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "structured_answers.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    pets = sum(line.startswith("name=") and "is_tame=" in line for line in lines)
    cut = sum(line.startswith("cut, as it was longer") for line in lines)
    assert pets >= 2
    assert pets + cut == 4, "draws are those of the machine's sums"
    assert sum(line in ("cats", "dogs") for line in lines) == 1
    assert sum(line.startswith("feed name=") for line in lines) == 1
