"""The folder of a predictor: whole or not at all, and of the right tokenizer."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmpq.lengths.boosting import Boosting
from llmpq.lengths.folder import (
    check_tokenizer,
    load_predictor,
    save_predictor,
    tokenizer_digest,
)
from planner.assumed_predictor import predictor_file
from quant.common.errors import InputError, SpecError
from tests.llmpq.lengths.learnable import BUCKETS, by_prompt_length, saved
from tests.paths import DEMO_MODEL

CONFUSION = np.diag([1, 2, 3])


def test_the_file_says_how_it_was_trained_and_how_it_errs(tmp_path: Path) -> None:
    save_predictor(tmp_path / "p", by_prompt_length("ab"), CONFUSION)
    file = predictor_file(tmp_path / "p")
    assert (file.kind, file.buckets, file.trained_rows) == ("boosting", BUCKETS, 1)
    assert file.confusion == ((1, 0, 0), (0, 2, 0), (0, 0, 3))
    assert file.tokenizer == "ab"


def test_what_is_there_is_replaced_only_if_it_is_a_predictor_and_wanted(tmp_path: Path) -> None:
    folder = saved(tmp_path / "p")
    with pytest.raises(InputError, match="--overwrite"):
        save_predictor(folder, by_prompt_length(), CONFUSION)
    save_predictor(folder, replace(by_prompt_length(), trained_rows=7), CONFUSION, replace=True)
    assert load_predictor(folder).trained_rows == 7
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    for target in (other, other / "thesis.tex"):
        with pytest.raises(InputError, match="something else is there"):
            save_predictor(target, by_prompt_length(), CONFUSION, replace=True)
    (tmp_path / "empty").mkdir()
    save_predictor(tmp_path / "empty", by_prompt_length(), CONFUSION)
    with pytest.raises(InputError, match="there is no folder"):
        save_predictor(tmp_path / "no" / "p", by_prompt_length(), CONFUSION)
    assert {path.name for path in tmp_path.iterdir()} == {"p", "other", "empty"}


def test_an_end_while_writing_leaves_what_there_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "p")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def torn(model: Boosting, aside: Path) -> None:
        (aside / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Boosting, "save", torn)
    for target in (folder, tmp_path / "q"):
        with pytest.raises(InputError, match="No space left"):
            save_predictor(target, by_prompt_length(), CONFUSION, replace=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_the_digest_is_that_of_the_tokenizer_alone(tmp_path: Path) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    same.mkdir()
    other.mkdir()
    shutil.copy(DEMO_MODEL / "tokenizer.json", same)
    text = (DEMO_MODEL / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text + " ")
    digest = tokenizer_digest(DEMO_MODEL, 5)
    assert digest == tokenizer_digest(same, 9)
    assert digest != tokenizer_digest(other, 5)
    assert tokenizer_digest(tmp_path, 5) != tokenizer_digest(tmp_path, 6)
    assert tokenizer_digest(tmp_path, 5) == tokenizer_digest(tmp_path, 5)


def test_a_predictor_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "p", by_prompt_length("theirs"))
    file = predictor_file(folder)
    check_tokenizer(file, folder, "theirs", "a model")
    with pytest.raises(SpecError, match=r"another tokenizer \(theirs\) than a model has \(ours\)"):
        check_tokenizer(file, folder, "ours", "a model")
    check_tokenizer(file.model_copy(update={"tokenizer": None}), folder, "ours", "a model")
