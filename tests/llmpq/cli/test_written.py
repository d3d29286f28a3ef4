"""What planning writes is named, with the command that comes next and the files that were given."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from llmpq.cli import plan as plan_cli
from llmpq.cli.common import console
from tests.paths import DEMO_MODEL

PROMPTS = """{"custom_id": "a", "prompt": [5, 6, 7]}\n{"custom_id": "b", "prompt": [5, 6]}\n"""


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    """A small batch for the prompts of a file."""
    (tmp_path / "my prompts.jsonl").write_text(PROMPTS)
    where = ["--model", str(DEMO_MODEL), "--device_names", "T4", "--device_numbers", "1"]
    given = ["--input", str(tmp_path / "my prompts.jsonl"), "--n", "4"]
    return [*where, *given, "--global_bz", "2", "--theta", "1"]


def test_every_file_is_named_with_what_comes_next(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("plan.json", "page.html", "trace.svg", "front.svg", "here.yaml")
    plan, page, trace, front, cluster = (str(tmp_path / name) for name in names)
    files = ["-o", plan, "--report", page, "--trace", trace, "--pareto", front]
    assert plan_cli.main([*asked, *files, "--write_cluster", cluster]) == 0
    out = capsys.readouterr().out.splitlines()
    told = [line for line in out if line.startswith("wrote ")]
    assert all(Path(path).stat().st_size for path in (plan, page, trace, front, cluster))
    next_run = shlex.join(["--plan", plan, "--input", str(tmp_path / "my prompts.jsonl")])
    assert told == [
        f"wrote {cluster}; correct it where it is wrong, then llmpq plan --model {DEMO_MODEL} "
        f"--cluster {cluster}",
        f"wrote {front}; open it in a browser; --theta X plans the one you like",
        f"wrote {plan}; run it: llmpq run {next_run} --output results.jsonl",
        f"wrote {page}; open it in a browser",
        f"wrote {trace}; open it in a browser",
    ]


SMALL = ["--global_bz", "1", "--s", "16", "--n", "4", "--theta", "1"]
ON_T4 = ["--model", "opt-125m", "--device_names", "T4", "--device_numbers", "1", *SMALL]


def test_beside_json_the_words_go_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, trace = str(tmp_path / "plan.json"), str(tmp_path / "trace.json")
    assert plan_cli.main([*ON_T4, "--json", "-o", plan, "--trace", trace]) == 0
    out, error = capsys.readouterr()
    assert json.loads(out) == json.loads(Path(plan).read_text())
    assert f"wrote {plan}; run it: llmpq run" in error
    assert f"wrote {trace}; open it in https://ui.perfetto.dev" in error


def test_a_model_without_weights_here_asks_for_their_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "plan.json")
    assert plan_cli.main([*ON_T4, "-o", target]) == 0
    assert (
        f"run it: llmpq run --plan {target} --input prompts.jsonl --model FOLDER --output "
        "results.jsonl"
    ) in capsys.readouterr().out


@pytest.mark.parametrize(("columns", "width"), [(None, 80), ("120", 120)])
def test_output_to_no_terminal_has_80_columns_or_what_columns_says(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert console().width == width
    assert console(stderr=True).width == width
