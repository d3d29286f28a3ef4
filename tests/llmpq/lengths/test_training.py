"""Training on most rows and judging by the others; and the command around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmpq.cli.measure.forecasts import lengths_main
from llmpq.lengths.boosting import feature_count
from llmpq.lengths.finished_rows import LearntRow
from llmpq.lengths.folder import tokenizer_digest
from llmpq.lengths.predictor import Prompt, buckets_of, confusion_of, likeliest
from llmpq.lengths.training import HELD_OUT, TrainingOptions, judge, train
from planner.assumed_predictor import predictor_file
from quant.common.errors import LlmpqError, SpecError
from tests.llmpq.lengths.learnable import (
    BUCKETS,
    by_prompt_length,
    expected_by_hand,
    learnable,
    prompts_of,
    saved,
    tokens_of,
)
from tests.paths import DEMO_MODEL

IDS = ("any", 256)


def test_figures_are_those_of_the_predictions() -> None:
    """Of a predictor that is known by hand, row by row."""
    rows = [
        LearntRow(Prompt(str(n), 99, tuple(range(n % 13))), 1 + 7 * n % 45) for n in range(1, 50)
    ]
    found = judge(by_prompt_length(), rows)
    expected = [expected_by_hand(row.prompt) for row in rows]
    true = buckets_of(tokens_of(rows), BUCKETS)
    predicted = buckets_of(expected, BUCKETS)
    assert found.confusion.tolist() == confusion_of(true, predicted, 3).tolist()
    assert found.predictor.accuracy == np.mean(true == predicted)
    assert found.longest.accuracy == np.mean(true == 2)
    assert found.longest.too_short == 0
    assert found.majority.accuracy == max(np.bincount(true)) / len(rows)
    assert found.ms_per_prompt > 0


@pytest.mark.parametrize("kind", ["boosting", "classifier"])
def test_training_gives_a_predictor_and_says_how_it_errs(kind: str) -> None:
    if kind == "boosting":
        pytest.importorskip("sklearn")
    rows = learnable(100)
    options = TrainingOptions(kind=kind, buckets=4, epochs=12)  # type: ignore[arg-type]
    model, found = train(rows, options, IDS)
    assert model.buckets == (4, 16, 38)
    assert found.predictor.rows == found.confusion.sum() == round(HELD_OUT * 100)
    assert model.trained_rows == 100 - found.predictor.rows
    assert found.predictor.accuracy > found.majority.accuracy
    again, same = train(rows, options, IDS)
    assert same.confusion.tolist() == found.confusion.tolist()
    encoded = model.encode(prompts_of(rows))
    first, second = (each.probabilities(encoded) for each in (model, again))
    assert (likeliest(first) == likeliest(second)).all()


@pytest.mark.parametrize(
    ("rows", "options", "named"),
    [
        ([], {}, "there are 0 finished rows to learn from; give at least 20"),
        (learnable(19), {}, "there are 19 finished rows"),
        ([LearntRow(Prompt("a", 9, (1,), "x"), 3)] * 30, {}, "all 24 answers .* in one bucket"),
        (
            [LearntRow(row.prompt, 4 - (i < 2)) for i, row in enumerate(learnable(60))],
            {"buckets": 2},
            "in one bucket, of at most 4 tokens; .* or give more --buckets",
        ),
        (learnable(30), {"kind": "classifier", "no ids": True}, "name the model"),
        (learnable(30), {"kind": "classifier", "base": "/nowhere"}, "there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(
    rows: list[LearntRow], options: dict[str, Any], named: str
) -> None:
    ids = None if options.pop("no ids", False) else IDS
    with pytest.raises(LlmpqError, match=named):
        train(rows, TrainingOptions(**options), ids)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"buckets": 1}, "buckets is 1"),
        ({"longest": 1}, "longest is 1"),
        ({"epochs": 0}, "epochs is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, int], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        TrainingOptions(**options)  # type: ignore[arg-type]


def rows_file(path: Path, rows: list[LearntRow]) -> str:
    lines = (
        {"custom_id": row.prompt.custom_id, "prompt": row.prompt.text, "output_tokens": row.tokens}
        for row in rows
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_the_command_trains_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    seen = rows_file(tmp_path / "seen.jsonl", learnable(100))
    others = rows_file(tmp_path / "others.jsonl", learnable(40, seed=1))
    folder, figures = tmp_path / "p", tmp_path / "figures.json"
    model = ["--model", str(DEMO_MODEL)]
    assert (
        lengths_main(["train", "--input", seen, *model, "-o", str(folder), "--buckets", "4"]) == 0
    )
    printed = capsys.readouterr().out
    assert "the most frequent bucket" in printed
    *table, written = printed.splitlines()
    assert max(map(len, table)) <= 80
    assert written.startswith(f"wrote {folder}; plan with it: llmpq plan --input prompts.jsonl")
    file = predictor_file(folder)
    vocab_size = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
    assert file.tokenizer == tokenizer_digest(DEMO_MODEL, vocab_size)
    assert sum(map(sum, file.confusion)) == 20
    command = ["evaluate", "--predictor", str(folder), "--input", others]
    assert lengths_main([*command, *model, "--json", str(figures)]) == 0
    told = json.loads(figures.read_text())
    assert told["predictor"]["rows"] == 40
    assert told["predictor"]["accuracy"] > 0.9 > told["longest"]["accuracy"]
    assert np.trace(told["confusion"]) == round(40 * told["predictor"]["accuracy"])
    assert lengths_main(["train", "--input", seen, "-o", str(folder)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert lengths_main(["train", "--input", seen, "-o", str(folder), "--overwrite"]) == 0
    assert predictor_file(folder).tokenizer is None
    assert lengths_main(command) == 0


def test_a_predictor_that_has_learnt_nothing_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts that are all alike, with answers of two lengths in turns."""
    rows = [LearntRow(Prompt(f"r{n}", 9, (1,), "x"), 1 + 8 * (n % 2)) for n in range(40)]
    given = rows_file(tmp_path / "in.jsonl", rows)
    pytest.importorskip("sklearn")
    assert lengths_main(["train", "--input", given, "-o", str(tmp_path / "p")]) == 0
    assert "no more often than the most frequent bucket" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--lengths", "{empty}"], "no finished row"),
        ([], "no output_tokens"),
        (["--model", "/nowhere"], "there is no folder /nowhere"),
        (["--json", "/nowhere/x"], "name a file in a folder that exists"),
    ],
)
def test_the_command_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "prompt": "x"}\n')
    if "--model" in arguments:
        rows_file(tmp_path / "in.jsonl", learnable(30))
    given = [each.format(empty=tmp_path / "empty.jsonl") for each in arguments]
    command = ["train", "--input", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "p"), *given]
    assert lengths_main(command) == 2
    found = capsys.readouterr().err
    assert found.startswith("llmpq-lengths: error: ")
    assert named in found
    assert not (tmp_path / "p").exists()


def test_options_without_effect_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        lengths_main(["train", "--input", "x", "-o", "y", "--epochs", "3"])
    assert refused.value.code == 2
    assert "--kind classifier" in capsys.readouterr().err


def test_a_predictor_of_another_tokenizer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_file(tmp_path / "in.jsonl", learnable(20))
    folder = saved(tmp_path / "p", by_prompt_length("another"))
    command = ["evaluate", "--predictor", str(folder), "--input", rows]
    assert lengths_main([*command, "--model", str(DEMO_MODEL)]) == 2
    assert "reads ids of another tokenizer (another)" in capsys.readouterr().err
    assert lengths_main(command) == 2
    assert "name the model whose tokenizer" in capsys.readouterr().err


def test_of_texts_alone_a_predictor_reads_texts_alone() -> None:
    pytest.importorskip("sklearn")
    model, _ = train(learnable(40), TrainingOptions(buckets=4), None)
    assert model.tokenizer is None
    assert len(model.encode([Prompt("a", 9, (), "x")])[0]) == feature_count(False, True)
