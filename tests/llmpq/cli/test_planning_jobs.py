"""`llmpq-algo` for a whole job: its front, and what it takes from a file of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmpq import Plan, Workload
from llmpq.cli import algo


def test_the_front_of_a_job_has_the_seconds_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    devices = ["--device_names", "V100-32GB", "--device_numbers", "1"]
    job = ["--prompts", "8", "--s", "64", "--n", "16", "--in_flight", "4", "--group", "8"]
    assert algo.main(["--model", "opt-6.7b", *devices, *job, "--pareto"]) == 0
    assert "s for the job" in capsys.readouterr().out


def test_workload_from_prompts(tiny: tuple[Path, Any], cluster_file: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": [3] * 7, "max_new_tokens": 5},
        {"prompt": [4] * 12, "max_new_tokens": 3},
        {"prompt": 17},
    ]
    prompts, target = tmp_path / "prompts.jsonl", tmp_path / "plan.json"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--model", str(tiny[0]), "--cluster", str(cluster_file), "--dtype", "float32"]
    assert algo.main([*arguments, "--input", str(prompts), "-o", str(target)]) == 0
    assert Plan.load(target).workload == Workload(2, 12, 5, slot_tokens=15)
    assert algo.main([*arguments, "--input", str(prompts), "--n", "9", "-o", str(target)]) == 0
    all_rows_have_limits = Plan.load(target)
    assert all_rows_have_limits.workload == Workload(2, 12, 5, slot_tokens=15)
