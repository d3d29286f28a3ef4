"""The command `llmpq eval`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llmpq import Plan
from llmpq.cli.measure.quality import evaluate_main
from llmpq.quality.text_windows import token_windows
from tests.actors.configs import CONFIGS, VOCABULARY
from tests.actors.models import save_tiny
from tests.llmpq.commands import exit_code
from tests.llmpq.quality.losses import by_transformers, token_text
from tests.paths import DEMO_MODEL


def ids_file(folder: Path) -> Path:
    path = folder / "text.jsonl"
    path.write_text(json.dumps({"prompt": token_text()}) + "\n")
    return path


def test_command_prints_a_table_and_writes_json(
    tiny: tuple[Path, Any], plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.save(tmp_path / "plan.json")
    target = tmp_path / "out.json"
    bits = ["--bits", "16", "4", "3,3,4,16,16"]
    arguments = ["--strat-file-name", str(tmp_path / "plan.json"), *bits, "--json", str(target)]
    code = evaluate_main([*arguments, "--text", str(ids_file(tmp_path)), "--sequence-length", "24"])
    printed = capsys.readouterr().out
    assert code == 0
    found = json.loads(target.read_text())
    expected = by_transformers(tiny[1], token_windows([token_text()], None, 24))
    assert found[0]["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert found[1]["perplexity"] == pytest.approx(found[0]["perplexity"], rel=1e-6)
    assert [entry["bitwidths"] for entry in found[1:]] == [[16] * 5, [4] * 5, [3, 3, 4, 16, 16]]
    for part in ("125 tokens", "6 windows", "3x2 4x1 16x2", f"{found[3]['perplexity']:.3f}"):
        assert part in printed
    assert found[0]["divergence"] is None  # the plan is at 16 bit
    assert found[1]["divergence"] == pytest.approx(0, abs=1e-6)
    assert 0 < found[3]["divergence_error"] < found[3]["divergence"]
    assert f"{found[3]['divergence']:.5f}" in printed
    assert printed.splitlines()[-1] == f"wrote {target}"
    assert max(map(len, printed.splitlines()[:-1])) <= 80


def test_text_from_standard_input_by_the_models_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = b"A list is a mutable sequence. Lists may be sorted in place. " * 3
    stream = io.TextIOWrapper(io.BytesIO(words))
    monkeypatch.setattr("sys.stdin", stream)
    target = tmp_path / "out.json"
    arguments = ["--model", str(DEMO_MODEL), "--bits", "16", "--text", "-", "--max_tokens", "40"]
    assert evaluate_main([*arguments, "--json", str(target)]) == 0
    (found,) = json.loads(target.read_text())
    assert found["tokens"] == 39
    assert found["standard_error"] is None
    assert 1 < found["perplexity"] < 2000
    assert "39 tokens" in capsys.readouterr().out


REFUSED: dict[str, tuple[list[str], str]] = {
    "nothing to evaluate": (["--model", "{model}", "--text", "{text}"], "--plan"),
    "no text": (["--model", "{model}", "--bits", "4"], "--text"),
    "no model": (["--bits", "4", "--text", "{text}"], "--model"),
    "no such model": (["--model", "{folder}/no", "--bits", "4", "--text", "{text}"], "no folder"),
    "no such plan": (["--plan", "{folder}/no.json", "--text", "{text}"], "no.json"),
    "no such text": (["--model", "{model}", "--bits", "4", "--text", "{folder}/no"], "cannot read"),
    "empty text": (["--model", "{model}", "--bits", "4", "--text", "{empty}"], "no tokenizer"),
    "no ids": (["--model", "{model}", "--bits", "4", "--text", "{no_ids}"], "0 tokens"),
    "bitwidth": (["--model", "{model}", "--bits", "7", "--text", "{text}"], "bitwidth 7"),
    "no number": (["--model", "{model}", "--bits", "4;4", "--text", "{text}"], "4;4"),
    "layers": (["--model", "{model}", "--bits", "4,4", "--text", "{text}"], "5 layers"),
    "device": (["--model", "{model}", "--bits", "4", "--text", "{text}", "--device", "tpu"], "tpu"),
    "dtype": (["--model", "{model}", "--bits", "4", "--text", "{text}", "--dtype", "int"], "'int'"),
    "vocabulary": (["--model", "{model}", "--bits", "4", "--text", "{foreign}"], "vocabulary"),
    "positions": (
        ["--model", "{model}", "--bits", "4", "--text", "{long}", "--sequence_length", "150"],
        "128 positions",
    ),
    "output": (
        ["--model", "{model}", "--bits", "4", "--text", "{text}", "--json", "{folder}/no/x.json"],
        "cannot write",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_exits_2_with_one_message(
    name: str, tiny: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = REFUSED[name]
    places = {"model": tiny[0], "folder": tmp_path, "text": ids_file(tmp_path)}
    for file, ids in (("no_ids", []), ("foreign", [7] * 4 + [VOCABULARY]), ("long", [5] * 200)):
        places[file] = tmp_path / f"{file}.jsonl"
        places[file].write_text(json.dumps({"prompt": ids}))
    places["empty"] = tmp_path / "empty.txt"
    places["empty"].write_text("")
    code = exit_code(evaluate_main, [argument.format(**places) for argument in arguments])
    *usage, error = capsys.readouterr().err.splitlines()
    assert code == 2
    assert message in error
    assert not usage or usage[0].startswith("usage: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(
    tiny: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(tiny[0]), "--bits", "4", "--device", "cuda"]
    assert evaluate_main([*arguments, "--text", str(ids_file(tmp_path))]) == 2
    assert "finds no GPU" in capsys.readouterr().err


def test_weights_that_are_not_finite_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny(tmp_path / "model", CONFIGS["opt"])
    with torch.no_grad():
        model.model.decoder.layers[1].fc1.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "model")
    arguments = ["--model", str(tmp_path / "model"), "--bits", "3"]
    assert evaluate_main([*arguments, "--text", str(ids_file(tmp_path))]) == 2
    assert "layers.1.fc1.weight" in capsys.readouterr().err
