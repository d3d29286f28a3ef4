"""Classifiers of transformers: trained from nothing, and pretrained ones with their tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from llmpq.lengths.classifier import (
    MOST_TOKENS,
    Classifier,
    TuningOptions,
    from_nothing,
    pretrained,
    train_classifier,
)
from llmpq.lengths.folder import load_predictor
from llmpq.lengths.learner import accuracy
from llmpq.lengths.predictor import Example, Prompt, buckets_of
from quant.common.errors import SpecError
from tests.llmpq.lengths.learnable import (
    BUCKETS,
    KINDS,
    TOPICS,
    expected,
    learnable,
    prompts_of,
    saved,
    tokens_of,
)


@pytest.fixture(scope="module")
def trained() -> Classifier:
    """One that was trained from nothing."""
    rows = learnable(150)
    start = from_nothing(BUCKETS, 256, "any")
    return train_classifier(prompts_of(rows), tokens_of(rows), start, TuningOptions(epochs=14))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny BERT with two labels and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny-bert")
    text = " ".join(text for text, _ in KINDS) + " " + " ".join(TOPICS)
    splits = pre_tokenizers.Whitespace().pre_tokenize_str(text)
    words = dict.fromkeys(["[PAD]", "[UNK]", *(word for word, _ in splits)])
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    own.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=2,
    )
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_it_learns_what_prompts_ask_for(trained: Classifier) -> None:
    others = learnable(60, seed=1)
    found = expected(trained, prompts_of(others))
    right = buckets_of(found, BUCKETS) == buckets_of(tokens_of(others), BUCKETS)
    assert right.mean() > 0.95
    assert trained.trained_rows == 150


def test_a_prediction_does_not_depend_on_its_neighbours(trained: Classifier) -> None:
    """Lengths from one token to more than are read, in one batch and one by one."""
    prompts = [Prompt(str(n), 64, tuple(range(n))) for n in (1, 300, 7, 40, 2, MOST_TOKENS - 1, 0)]
    encoded = trained.encode(prompts)
    assert max(map(len, encoded)) == MOST_TOKENS
    together = trained.probabilities(encoded)
    for row, each in enumerate(encoded):
        assert trained.probabilities([each])[0] == pytest.approx(together[row], abs=1e-5)


def test_of_a_long_prompt_both_ends_are_read(trained: Classifier) -> None:
    long = tuple(range(3 * MOST_TOKENS))
    ends, other = ((*long[:-1], 5), (7, *long[1:]))
    first, second, third = (trained.encode([Prompt("a", 9, ids)])[0] for ids in (long, ends, other))
    assert first.tolist() != second.tolist()
    assert first.tolist() != third.tolist()


def test_it_is_the_same_after_it_was_saved(trained: Classifier, tmp_path: Path) -> None:
    loaded = load_predictor(saved(tmp_path / "p", trained))  # type: ignore[arg-type]
    encoded = trained.encode(prompts_of(learnable(9)))
    assert (loaded.probabilities(encoded) == trained.probabilities(encoded)).all()
    assert loaded.trained_rows == trained.trained_rows
    names = {path.suffix for path in (tmp_path / "p").iterdir()}
    assert names == {".json", ".safetensors"}


def test_a_pretrained_one_reads_texts_by_its_own_tokenizer(base: Path, tmp_path: Path) -> None:
    rows, others = learnable(120), learnable(30, seed=1)
    start = pretrained(str(base), BUCKETS)
    options = TuningOptions(epochs=6, learning_rate=5e-3)
    model = train_classifier(prompts_of(rows), tokens_of(rows), start, options)
    assert model.tokenizer is None
    assert model.reads_text
    examples = [
        Example(encoded, row.tokens)
        for encoded, row in zip(model.encode(prompts_of(others)), others, strict=True)
    ]
    assert accuracy(model, examples) > 0.95
    loaded = load_predictor(saved(tmp_path / "p", model))  # type: ignore[arg-type]
    found = loaded.probabilities(loaded.encode(prompts_of(others)))
    assert (found == model.probabilities([each.encoded for each in examples])).all()


def test_code_beside_weights_is_not_run(base: Path, tmp_path: Path) -> None:
    for path in base.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {
            "AutoConfig": "code.Own",
            "AutoModelForSequenceClassification": "code.Own",
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("open('/tmp/llmpq-ran', 'w')")
    with pytest.raises(SpecError, match="cannot be loaded as a classifier"):
        pretrained(str(tmp_path), BUCKETS)


def test_missing_weights_are_named(trained: Classifier, tmp_path: Path) -> None:
    folder = saved(tmp_path / "p", trained)  # type: ignore[arg-type]
    (folder / "model.safetensors").unlink()
    with pytest.raises(SpecError, match="cannot be loaded as a classifier"):
        load_predictor(folder)


def test_training_leaves_the_random_generator_as_it_was(trained: Classifier) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    from_nothing(BUCKETS, 64, "any")
    assert (torch.rand(3) == expected).all()
