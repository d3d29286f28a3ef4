"""Boosted trees: as scikit-learn computes them, from files that are checked."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmpq.lengths import boosting
from llmpq.lengths.boosting import Boosting, TreeOptions, features_of, train_boosting
from llmpq.lengths.folder import load_predictor
from llmpq.lengths.predictor import Example, Prompt, buckets_of
from quant.common.errors import SpecError
from tests.llmpq.lengths.learnable import (
    BUCKETS,
    by_prompt_length,
    expected,
    expected_by_hand,
    learnable,
    prompts_of,
    saved,
    tokens_of,
)

FEW = TreeOptions(rounds=12)


@pytest.mark.parametrize("buckets", [(10, 38), BUCKETS, (3, 4, 10, 20, 30, 38)])
def test_trees_give_what_scikit_learn_gives(
    buckets: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two buckets, of three, and of six of which some have no row."""
    pytest.importorskip("sklearn")
    models = []
    arrays = boosting._arrays
    monkeypatch.setattr(
        boosting, "_arrays", lambda model, count: models.append(model) or arrays(model, count)
    )
    rows, others = learnable(60), learnable(40, seed=1)
    noisy = [max(1, row.tokens - i % 4) for i, row in enumerate(rows)]
    ours = train_boosting(prompts_of(rows), noisy, buckets, "any", FEW)
    encoded = ours.encode(prompts_of(others))
    found = ours.probabilities(encoded)
    theirs = models[0].predict_proba(np.stack(encoded))
    assert found[:, models[0].classes_] == pytest.approx(theirs, abs=1e-12)
    assert found.sum(axis=1) == pytest.approx(np.ones(len(others)))


def test_it_learns_what_prompts_ask_for() -> None:
    pytest.importorskip("sklearn")
    rows, others = learnable(120), learnable(60, seed=1)
    model = train_boosting(prompts_of(rows), tokens_of(rows), BUCKETS, None, FEW)
    found = expected(model, prompts_of(others))
    assert buckets_of(found, BUCKETS).tolist() == buckets_of(tokens_of(others), BUCKETS).tolist()


def test_later_rows_change_it_and_leave_the_old_one_as_it_was() -> None:
    pytest.importorskip("sklearn")
    rows, turned = learnable(60), learnable(60, seed=1, turned=True)
    model = train_boosting(prompts_of(rows), tokens_of(rows), BUCKETS, None, FEW)
    before = model.probabilities(model.encode(prompts_of(turned)))
    examples = [
        Example(encoded, row.tokens)
        for encoded, row in zip(model.encode(prompts_of(turned)), turned, strict=True)
    ]
    rests: list[None] = []
    other = model.improved(examples, lambda: rests.append(None))
    assert len(rests) >= FEW.rounds
    assert other.trained_rows == 120
    assert len(other.features) == len(other.tokens) == 120
    assert (model.probabilities(model.encode(prompts_of(turned))) == before).all()
    assert (other.probabilities(other.encode(prompts_of(turned))) != before).any()


def test_without_scikit_learn_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    rows = learnable(30)
    with pytest.raises(SpecError, match=r"pip install 'llmpq\[lengths\]'"):
        train_boosting(prompts_of(rows), tokens_of(rows), BUCKETS, None)


def test_a_folder_has_all_that_predicting_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    loaded = load_predictor(saved(tmp_path / "p"))
    assert isinstance(loaded, Boosting)
    prompts = [Prompt(str(n), 30 + n, tuple(range(n))) for n in range(1, 15)]
    assert expected(loaded, prompts) == [expected_by_hand(each) for each in prompts]


def test_probabilities_that_are_not_finite_are_no_prediction() -> None:
    broken = by_prompt_length(value=float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        expected(broken, [Prompt("a", 5, (1, 2))])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("trees.left", lambda array: array * 0),  # leads back to the root for ever
        ("trees.right", lambda array: array + 5),
        ("trees.feature", lambda array: array + 10**6),
        ("trees.column", lambda array: array + 3),
        ("trees.threshold", lambda array: array[:, :2].copy()),
        ("trees.base", lambda array: array[:2].copy()),
        ("rows.features", lambda array: array[:, :7].copy()),
    ],
)
def test_arrays_that_are_no_trees_are_refused(tmp_path: Path, name: str, change: object) -> None:
    path = saved(tmp_path / "p") / boosting.WEIGHTS_FILE
    arrays = load_file(path)
    arrays[name] = change(arrays[name])  # type: ignore[operator]
    save_file(arrays, path, metadata={"reads_text": "0", "trained_rows": "1"})
    with pytest.raises(SpecError, match=r"model\.safetensors"):
        load_predictor(tmp_path / "p")


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", b"{}"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (saved(tmp_path / "p") / boosting.WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(SpecError, match=r"model\.safetensors cannot be read"):
        load_predictor(tmp_path / "p")


def test_features_are_numbers_of_any_text() -> None:
    for text in ("", " ", "\ud800" * 3, "ſ²" * 9, "a" * 100_000, "1. a\n2. b\n```x```?"):
        found = features_of(Prompt("a", 5, tuple(range(len(text))), text), True, True)
        assert np.isfinite(found).all()
        assert found.shape == (boosting.feature_count(True, True),)


def test_a_list_is_told_from_a_question() -> None:
    asks, lists = (
        features_of(Prompt("a", 5, text=text), True, False)
        for text in ("Is it so?", "List all of it:")
    )
    assert (asks != lists).sum() > 5


def test_the_base_score_of_an_unseen_bucket_is_none() -> None:
    model = by_prompt_length()
    trees = replace(model.trees, base=np.array([0.0, -np.inf, 0.0]))
    found = replace(model, trees=trees).probabilities(model.encode([Prompt("a", 9, (1,) * 7)]))
    assert found[0].tolist() == [0.5, 0.0, 0.5]
