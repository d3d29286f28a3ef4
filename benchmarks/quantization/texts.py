"""Texts: what is held out to be predicted, and what calibrates.

For the demo model those of `quality`. For SmolLM2 English papers, which are no part of
the repository: `s3.txt` held out, `orca.txt` and `exegpt.txt` to calibrate, in `shared/seeds`
beside the repository; elsewhere any other English text, by `--text` and `--calibration`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.quantization.models import DEMO
from benchmarks.quantization.quality import read_texts
from llmpq.quality.text_windows import Windows, read_documents, token_windows
from llmpq.tokenizing.requests import load_tokenizer

LENGTH = 512
HELD_OUT_TOKENS = 8192
QUICK_TOKENS = 2048
CALIBRATION_TOKENS = 16384
_PAPERS = Path(__file__).resolve().parents[3] / "shared" / "seeds"


@dataclass(frozen=True)
class Texts:
    """Windows of the text to predict, and of the text to calibrate on."""

    held_out: Windows
    calibration: Windows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that name texts."""
    parser.add_argument("--text", type=Path, nargs="+", help="held-out English text for SmolLM2")
    parser.add_argument("--calibration", type=Path, nargs="+", help="and text to calibrate on")
    parser.add_argument("--tokens", type=int, default=HELD_OUT_TOKENS, help="held-out tokens")
    parser.add_argument(
        "--calibration-tokens", type=int, default=CALIBRATION_TOKENS, help="tokens to calibrate on"
    )


def texts_for(model: Path, options: argparse.Namespace) -> Texts:
    """The texts for a model, in windows of its tokens. Raises `SystemExit` where none are named."""
    if model == DEMO:
        calibration, held_out = read_texts()
    else:
        held_out = _read("--text", options.text, ["s3.txt"])
        calibration = _read("--calibration", options.calibration, ["orca.txt", "exegpt.txt"])
    tokenizer = load_tokenizer(model)
    tokens = min(options.tokens, QUICK_TOKENS) if options.quick else options.tokens
    return Texts(
        token_windows(held_out, tokenizer, LENGTH, tokens),
        token_windows(calibration, tokenizer, LENGTH, options.calibration_tokens),
    )


def _read(option: str, named: Sequence[Path] | None, papers: Sequence[str]) -> list[str]:
    files = [_PAPERS / name for name in papers] if named is None else list(named)
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise SystemExit(f"{', '.join(missing)} not found; name English text by {option}")
    return [str(text) for text in read_documents(files)]
