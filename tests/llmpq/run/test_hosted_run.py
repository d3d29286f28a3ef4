"""A plan with experts in hosts' memory as a user makes and runs it, on Ray."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from llmpq import Plan
from llmpq.cli.main import main
from tests.actors.models import references
from tests.paths import EXAMPLES, SPECS


@pytest.mark.rare  # `tests/actors/stage/test_hosted_experts.py` runs the same stages without Ray
@pytest.mark.usefixtures("local_ray")
def test_tokens_are_those_of_generate_and_a_bad_row_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    model = importlib.import_module("tiny_experts").write(tmp_path / "tiny")
    plan, output = tmp_path / "plan.json", tmp_path / "results.jsonl"
    asked = ["--model", str(tmp_path / "tiny"), "--cluster", str(SPECS / "emulated_hosts.yaml")]
    asked += ["--dtype", "float32", "--bits", "16", "--s", "16", "--n", "8", "--global_bz", "12"]
    assert main(["plan", *asked, "-o", str(plan)]) == 0
    hosted = [stage.hosted_experts for stage in Plan.load(plan).spec.stages]
    assert len(hosted) == 3
    assert sum(map(len, hosted)) > 1
    rows = tmp_path / "tiny" / "rows.jsonl"
    assert main(["run", "--plan", str(plan), "--input", str(rows), "--output", str(output)]) == 3
    found = {row["custom_id"]: row for row in map(json.loads, output.read_text().splitlines())}
    *good, bad = map(json.loads, rows.read_text().splitlines())
    assert len(good) == 12
    expected = references(model, [tuple(row["prompt"]) for row in good], 8)
    assert [found[row["custom_id"]]["token_ids"] for row in good] == expected
    assert "beyond the vocabulary" in found[bad["custom_id"]]["error"]
