"""A job whose rows do harm to template and tokenizer: the others are answered."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from llmpq import Plan
from llmpq.cli import run as run_cli
from llmpq.jobs.inputs import JobInput
from llmpq.tokenizing.prompting import Prompting
from llmpq.tokenizing.tokenizer_process import RowLimits, TokenizerProcess
from llmpq.workload.input_job import batch_of_input
from quant.common.errors import SpecError
from tests.actors.models import reference
from tests.llmpq.conftest import NEW_TOKENS
from tests.llmpq.fake_jobs import results_in, write_prompts
from tests.llmpq.processes import alive
from tests.llmpq.small_tokenizers import BY_CONTENT, GIVES_UP, MANY_X, write_tokenizer

BAD: dict[str, Any] = {
    "panic": MANY_X,
    "long": "a " * 10**6,
    "recursion": [{"role": "user", "content": "recursion"}],
    "wrong type": [{"role": "user", "content": "wrong type"}],
    "memory": [{"role": "user", "content": "memory"}],
    "loop": [{"role": "user", "content": "loop"}],
    "half a pair": [{"role": "user", "content": "half a pair"}],
    "image": [{"role": "user", "content": [{"type": "image_url"}]}],
    "silent": [{"role": "user"}],
}
CAUSES = {
    "panic": "tokenizer: PanicException",
    "long": "has 2000000 characters",
    "recursion": "RecursionError",
    "wrong type": "AttributeError",
    "memory": "more memory than a row may take",
    "loop": "took more than 1 s",
    "half a pair": "chat template: \\ud800",
    "image": "image_url",
    "silent": "no content",
}


@pytest.fixture(scope="module")
def model(tiny: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "model"
    shutil.copytree(tiny[0], folder)
    return write_tokenizer(folder, BY_CONTENT, GIVES_UP)


def rows_between(good: str, bad: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, (name, prompt) in enumerate(bad.items()):
        rows.append({"custom_id": f"good {number}", "prompt": good})
        rows.append(
            {"custom_id": name, "messages" if isinstance(prompt, list) else "prompt": prompt}
        )
    parts = [{"type": "text", "text": part} for part in good.split()]
    return [*rows, {"custom_id": "parts", "messages": [{"role": "user", "content": parts}]}]


def test_bad_rows_are_errors_and_the_job_goes_on(
    one_stage: Plan,
    tiny: tuple[Path, Any],
    model: Path,
    tmp_path: Path,
    local_ray: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = rows_between("hello world", BAD)
    write_prompts(tmp_path / "in.jsonl", *rows)
    one_stage.save(tmp_path / "plan.json")
    arguments = ["--plan", str(tmp_path / "plan.json"), "--input", str(tmp_path / "in.jsonl"),
                 "--output", str(tmp_path / "out.jsonl"), "--model", str(model)]  # fmt: skip
    assert run_cli.main([*arguments, "--row_s", "1"]) == 3
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "a row's chat template or tokens took more than 1 s" in error
    found = results_in(tmp_path / "out.jsonl")
    assert found.keys() == {row["custom_id"] for row in rows}
    expected = reference(tiny[1], (10, 11), NEW_TOKENS)
    for custom_id, result in found.items():
        if custom_id in BAD:
            assert CAUSES[custom_id] in result["error"]
            assert result["token_ids"] == []
        else:
            assert result["error"] is None
            assert result["token_ids"] == expected
            assert isinstance(result["text"], str)

    def no_ray(*_: object) -> None:
        pytest.fail("Ray is started")

    monkeypatch.setattr("llmpq.remote.shared_stages.ray_session", no_ray)
    write_prompts(tmp_path / "in.jsonl", *rows, {"custom_id": "more", "prompt": MANY_X})
    assert run_cli.main([*arguments, "--extend"]) == 3
    assert len(results_in(tmp_path / "out.jsonl")) == len(rows) + 1
    (model / "chat_template.jinja").write_text("{% for m in messages %}")
    assert run_cli.main([*arguments, "--overwrite"]) == 2
    error = capsys.readouterr().err
    assert f"{model}/chat_template.jinja: Unexpected end of template" in error
    assert "Traceback" not in error
    assert len(results_in(tmp_path / "out.jsonl")) == len(rows) + 1


def test_a_run_that_is_refused_leaves_no_process(
    one_stage: Plan, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: set[int] = set()

    def started(folder: Path, limits: RowLimits, prompting: Prompting) -> TokenizerProcess:
        process = TokenizerProcess(folder, limits)
        pids.add(process.pid)
        return process

    def refused(_: Path) -> None:
        raise SpecError("no such architecture")

    monkeypatch.setattr("llmpq.run.engine.start_tokenizer", started)
    monkeypatch.setattr("actors.stage.model_config.check_transformers_builds", refused)
    with pytest.raises(SpecError, match="no such architecture") as caught:
        one_stage.run(["hello"], model=str(model))
    assert caught.traceback  # as a notebook keeps it, and what its frames hold
    assert pids
    assert not alive(pids)


def test_lengths_are_measured_around_bad_rows(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").write_text(BY_CONTENT)
    slow = {name: prompt for name, prompt in BAD.items() if name not in ("loop", "long", "memory")}
    source = write_prompts(tmp_path / "in.jsonl", *rows_between("hello world", slow))
    assert len(list(JobInput.find([source]).rows())) == 2 * len(slow) + 1
    workload = batch_of_input([source], str(model), {}).workload
    assert workload.prompt_length == 2
