"""`llmpq plan` for a whole job: its front, and what it takes from a file of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmpq import Plan, Workload
from llmpq.cli import plan as plan_cli


def test_the_front_of_a_job_has_the_seconds_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    devices = ["--device_names", "V100-32GB", "--device_numbers", "1"]
    job = ["--prompts", "8", "--s", "64", "--n", "16", "--in_flight", "4", "--group", "8"]
    assert plan_cli.main(["--model", "opt-6.7b", *devices, *job, "--pareto"]) == 0
    assert "time of the job" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "{", '{"kind": "oracle"}'])
def test_a_predictor_that_is_none_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    if content is not None:
        (tmp_path / "predictor.json").write_text(content)
    devices = ["--device_names", "T4", "--device_numbers", "1"]
    job = ["--prompts", "8", "--policy", "s3", "--predictor", str(tmp_path)]
    assert plan_cli.main(["--model", "opt-125m", *devices, *job]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "predictor.json") in said.replace("\n", "")
    assert "Traceback" not in said


def test_workload_from_prompts(tiny: tuple[Path, Any], cluster_file: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": [3] * 7, "max_new_tokens": 5},
        {"prompt": [4] * 12, "max_new_tokens": 3},
        {"prompt": 17},
    ]
    prompts, target = tmp_path / "prompts.jsonl", tmp_path / "plan.json"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--model", str(tiny[0]), "--cluster", str(cluster_file), "--dtype", "float32"]
    assert plan_cli.main([*arguments, "--input", str(prompts), "-o", str(target)]) == 0
    assert Plan.load(target).workload == Workload(2, 12, 5, slot_tokens=15)
    assert plan_cli.main([*arguments, "--input", str(prompts), "--n", "9", "-o", str(target)]) == 0
    all_rows_have_limits = Plan.load(target)
    assert all_rows_have_limits.workload == Workload(2, 12, 5, slot_tokens=15)
