"""The commands of docs/planning.md for a group of two: a model that neither CPU has room for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmpq import Cluster, Job, Plan
from llmpq.cli.running.algo import main as plan
from llmpq.cli.running.dist import main as run
from llmpq.errors import InfeasibleError
from tests.paths import EXAMPLES, ROOT

MODEL = str(EXAMPLES / "demo_model")
PROMPTS = EXAMPLES / "demo_prompts.jsonl"
COUNT, LONGEST = 6, 120


@pytest.mark.usefixtures("local_ray")
def test_the_demo_runs_with_a_group_of_two(tmp_path: Path) -> None:
    cluster = tmp_path / "two.yaml"
    text = (ROOT / "cluster_specs" / "demo_group_cpu.yaml").read_text()
    cluster.write_text(text.replace("memory_gib: 0.12", "memory_gib: 0.0055"))
    lines = PROMPTS.read_text().splitlines()[:COUNT]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    made, out = str(tmp_path / "plan.json"), tmp_path / "out.jsonl"
    size = ["--prompts", str(COUNT), "--s", str(LONGEST), "--n", "8", "--bits", "16"]
    words = ["--model", MODEL, "--cluster", str(cluster), *size]
    assert plan([*words, "--tensor_parallel", "2", "-o", made]) == 0
    (stage,) = Plan.load(made).stages
    assert stage.degree == 2
    one = tmp_path / "one.yaml"
    one.write_text(cluster.read_text().replace("{CPU: 2}", "{CPU: 1}"))
    with pytest.raises(InfeasibleError):
        Cluster.from_yaml(one).plan(MODEL, Job.of(COUNT, LONGEST, 8), bits=[16])
    assert run(["--plan", made, "--input", str(tmp_path / "in.jsonl"), "--output", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == COUNT
    assert all(row["error"] is None and row["token_ids"] for row in rows)
