"""`llmpq run` and `llmpq plan` with rows at a web server and results at a URL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmpq import Plan
from llmpq.cli import run as run_cli
from quant.common import url_files
from tests.actors.models import reference
from tests.llmpq.object_server import ObjectServer, object_server

NEW_TOKENS = 4


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(url_files, "BACKOFF_S", 0.0)
    with object_server() as started:
        yield started


@pytest.fixture
def plan_file(plan: Plan, tmp_path: Path) -> Path:
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.mark.usefixtures("local_ray")
def test_rows_of_a_server_and_results_at_a_url(
    tiny: tuple[Path, Any],
    one_stage: Plan,
    tmp_path: Path,
    server: ObjectServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rows that are the same are computed once, and a start anew finds all done."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    one_stage.save(tmp_path / "plan.json")
    rows = [{"custom_id": f"q{i}", "prompt": [5 + i % 3] * 3, "topic": i} for i in range(9)]
    server.objects["/rows.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows).encode()
    server.faults = [503, "cut"]
    arguments = ["--plan", str(tmp_path / "plan.json"), "--input", server.url("/rows.jsonl")]
    arguments += ["--output", f"file://{tmp_path}/there/results.jsonl"]
    arguments += ["--dedupe", "--max_new_tokens", str(NEW_TOKENS)]
    for _ in range(2):
        assert run_cli.main(arguments) == 0, capsys.readouterr().err
    assert "all 9 rows are done" in capsys.readouterr().err
    lines = (tmp_path / "there" / "results.jsonl").read_text().splitlines()
    results = {each["custom_id"]: each for each in map(json.loads, lines)}
    assert len(lines) == len(results) == 9
    for row in rows:
        expected = reference(tiny[1], tuple(row["prompt"]), NEW_TOKENS)  # type: ignore[arg-type]
        found = results[str(row["custom_id"])]
        assert (found["token_ids"], found["topic"]) == (expected, row["topic"])


@pytest.mark.parametrize(
    ("source", "output", "told"),
    [
        ("/none.jsonl", "out.jsonl", "no such file, or no such bucket"),
        ("/rows.jsonl", "https://127.0.0.1/out.jsonl", "a web server takes no files"),
        ("/rows.jsonl", "nosuch://bucket/out.jsonl", "Protocol not known: nosuch"),
    ],
)
def test_what_cannot_be_used_is_refused(
    plan_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    server: ObjectServer,
    source: str,
    output: str,
    told: str,
) -> None:
    server.objects["/rows.jsonl"] = b'{"prompt": [3]}\n'
    output = output if "://" in output else str(tmp_path / output)
    arguments = ["--plan", str(plan_file), "--input", server.url(source), "--output", output]
    assert run_cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error
