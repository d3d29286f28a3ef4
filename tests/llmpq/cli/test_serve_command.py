"""The command `llmpq serve`: what it refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq import Plan
from llmpq.cli.serve import main


@pytest.fixture
def plan_file(plan: Plan, tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    plan.save(path)
    return str(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "port is 70000; give 1 to 65535"),
        (["--host", "0.0.0.0"], "is open to other machines, and there is no key"),
        (["--api_key_file", "/nothing/key"], "the API key file /nothing/key cannot be read"),
        (["--served_model_name", ""], "served_model_name is ''; give a name"),
        (["--served_model_name", "a", "a"], "'a' twice; give each name once"),
        (["--queue_limit", "-1"], "queue_limit is -1"),
        (["--prefill_chunk_tokens", "-2"], "prefill_chunk_tokens is -2"),
        (["--max_batch_size", "0"], "max_batch_size is 0"),
        (["--file_limit_mib", "0"], "file_limit_mib is 0.0; give a number above 0"),
        (["--batch_dir", "/dev/null/x"], "pass another --batch_dir"),
        ([], "the model folder has no tokenizer"),
    ],
)
def test_bad_input_is_refused_with_exit_code_2(
    options: list[str],
    words: str,
    plan_file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LLMPQ_API_KEY", raising=False)
    assert main(["--strat_file_name", plan_file, *options]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert words in said
    assert "Traceback" not in said
    assert not Path(f"{plan_file}.batches").exists()


def test_a_plan_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--strat_file_name", "nothing.json"]) == 2
    assert "nothing.json" in capsys.readouterr().err
