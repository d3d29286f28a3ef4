"""`llmpq quantize` on input that it cannot use: one message, exit code 2, nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from llmpq.cli.measure.checkpoints import quantize_main
from tests.actors.configs import VOCABULARY
from tests.actors.models import save_tiny
from tests.llmpq.commands import exit_code

CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=5,
    num_attention_heads=4,
)
WRONG: dict[str, tuple[list[str], str]] = {
    "no text": (["--bits", "4"], "give a text to calibrate on"),
    "no bits": (["--calibration", "text.jsonl"], "say once which bits"),
    "two plans": (
        ["--bits", "4", "--plan", "x.json", "--calibration", "text.jsonl"],
        "say once which bits",
    ),
    "bits of another model": (
        ["--bits", "4", "4", "--calibration", "text.jsonl"],
        "2 bitwidths where the model has 5 layers",
    ),
    "no such plan": (["--plan", "x.json", "--calibration", "text.jsonl"], "x.json"),
    "no such text": (["--bits", "4", "--calibration", "none.txt"], "none.txt"),
    "too much damping": (
        ["--bits", "4", "--calibration", "text.jsonl", "--damping", "2"],
        "damping is 2.0",
    ),
    "no sequences": (
        ["--bits", "4", "--calibration", "text.jsonl", "--sequences", "0"],
        "sequences is 0",
    ),
    "a seed that is none": (
        ["--bits", "4", "--calibration", "text.jsonl", "--seed", "-1"],
        "seed is -1; give at least 0",
    ),
    "no such device": (
        ["--bits", "4", "--calibration", "text.jsonl", "--device", "tpu"],
        "--device: unknown value 'tpu'; choose from auto, cpu, cuda",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_commands(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments, message = WRONG[name]
    save_tiny(tmp_path / "model", CONFIG)
    (tmp_path / "text.jsonl").write_text(json.dumps({"prompt": list(range(3, 60)) * 4}))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    shared = ["--model", str(tmp_path / "model"), "-o", str(tmp_path / "made")]
    assert exit_code(quantize_main, [*shared, "--sequence_length", "30", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("llmpq-quantize: error: ")
    assert message in error
    assert not (tmp_path / "made").exists()
