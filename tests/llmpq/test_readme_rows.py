"""The rows in README's table run as they stand there, on the demo model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llmpq import Cluster, Workload
from tests.paths import DEMO_MODEL, ROOT

TEMPLATE = "{% for each in messages %}{{ each.content }}{% endfor %}{# tools #}"
TABLE = "## What rows and jobs may ask for"


@pytest.mark.usefixtures("local_ray")
def test_every_row_of_the_table_runs(tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    text = page.partition(TABLE)[2].partition("\n## ")[0]
    rows = [json.loads(each) for each in re.findall(r"\| `(\{.*\})` \|$", text, re.MULTILINE)]
    for path in re.findall(r"`(tests/[a-z0-9_/]+\.py)`", text):
        assert (ROOT / path).is_file(), path
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    cluster = Cluster.from_yaml(ROOT / "cluster_specs" / "demo_mixed_cpu.yaml")
    plan = cluster.plan(DEMO_MODEL, Workload(8, 32, 120), theta=1.0)
    results = {
        each.custom_id: each for each in plan.run(rows, chat_template=tmp_path / "chat.jinja")
    }
    text_, chat, pet, label, called, several, scored, line = (
        results[row.get("custom_id", f"row-{number}")] for number, row in enumerate(rows)
    )
    assert all(each.error is None for each in results.values())
    assert 0 < len(text_.token_ids) <= 8
    assert 0 < len(chat.token_ids) <= 8
    assert json.loads(pet.text or "").keys() == {"kind", "tame"}
    assert label.text in ("cats", "dogs")
    (call,) = called.columns["tool_calls"]
    assert json.loads(call["function"]["arguments"])["town"] in ("Ulm", "Bonn")
    assert len({tuple(each["token_ids"]) for each in several.columns["generations"]}) == 3
    first, *others = scored.columns["prompt_logprobs"]
    assert first is None
    assert "".join(next(iter(each.values()))["decoded_token"] for each in others).endswith(" os")
    assert len(scored.columns["logprobs"]["token_logprobs"]) == 1
    assert 0 < len(line.token_ids) <= 8
