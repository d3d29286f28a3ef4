"""The predictor of S³ (section 3): a small transformer that classifies prompts into buckets.

A pretrained one, such as DistilBERT, reads texts by its own tokenizer. One that is trained from
nothing reads the ids of the served model's tokenizer, whose vocabulary is folded into few entries:
it tells kinds of prompts, not words.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from llmpq.lengths.predictor import Encoded, Example, FloatArray, Prompt, Rest, buckets_of
from quant.common.errors import SpecError

MOST_TOKENS = 256
"""Tokens of a prompt that are read: of a longer one the first and the last half of so many."""

FOLDED_VOCABULARY = 8192
_PAD, _CLASS, _FIRST_ID = 0, 1, 2

LEARNING_RATE = 2e-3
"""From nothing: a transformer of two small layers bears large steps."""

TUNED_LEARNING_RATE = 5e-5
"""Of a pretrained one, as in the paper of BERT (appendix A.3)."""

IMPROVING_STEPS = 32
"""Steps of one training beside a run, of as many rows each as `BATCH_ROWS`."""

BATCH_ROWS = 32
EPOCHS = 10
LEAST_STEPS = 200
_WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class TuningOptions:
    """How a classifier is trained.

    `learning_rate` None is that of its kind, `epochs` None `EPOCHS`, or as many as are
    `LEAST_STEPS` steps where there are few rows.
    """

    epochs: int | None = None
    learning_rate: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Classifier:
    """The predictor, as `BucketModel` says: `model` is a sequence classification of transformers.

    `own_tokenizer` makes ids of texts; None where it reads those of the served model.
    """

    buckets: tuple[int, ...]
    model: Any
    own_tokenizer: Any
    tokenizer: str | None
    trained_rows: int
    kind: Literal["classifier"] = field(default="classifier", init=False)

    @property
    def reads_text(self) -> bool:
        return self.own_tokenizer is not None

    def encode(self, prompts: Sequence[Prompt]) -> list[Encoded]:
        if self.own_tokenizer is not None:
            texts = [each.text for each in prompts]
            most = min(MOST_TOKENS, _positions(self.model))
            found = self.own_tokenizer(texts, truncation=True, max_length=most)["input_ids"]
            return [np.array(ids, dtype=np.int32) for ids in found]
        vocabulary = int(self.model.config.vocab_size) - _FIRST_ID
        return [_folded(each.token_ids, vocabulary) for each in prompts]

    def probabilities(self, encoded: Sequence[Encoded]) -> FloatArray:
        """Compute prompts of similar length together; as `BucketModel`."""
        found = np.zeros((len(encoded), len(self.buckets)))
        order = np.argsort([len(each) for each in encoded], kind="stable")
        for begin in range(0, len(order), BATCH_ROWS):
            rows = order[begin : begin + BATCH_ROWS]
            with torch.inference_mode():
                logits = self._logits([encoded[row] for row in rows])
            found[rows] = logits.double().softmax(dim=-1).numpy()
        return found

    def improved(self, examples: Sequence[Example], rest: Rest) -> Self:
        other = replace(
            self, model=copy.deepcopy(self.model), trained_rows=self.trained_rows + len(examples)
        )
        epochs = max(1, IMPROVING_STEPS * BATCH_ROWS // max(1, len(examples)))
        options = TuningOptions(min(epochs, 8), seed=self.trained_rows)
        _train(other, examples, options, rest)
        return other

    def save(self, folder: Path) -> None:
        """Write weights, configuration, and its tokenizer, if it has one, into `folder`."""
        self.model.save_pretrained(folder)
        if self.own_tokenizer is not None:
            self.own_tokenizer.save_pretrained(folder)

    @classmethod
    def load(
        cls, folder: Path, buckets: tuple[int, ...], tokenizer: str | None, trained_rows: int
    ) -> Classifier:
        """Read what `save` wrote; SpecError where it is damaged."""
        own = None if tokenizer is not None else _own_tokenizer(folder)
        return cls(buckets, _pretrained(folder, len(buckets)), own, tokenizer, trained_rows)

    def _logits(self, encoded: Sequence[Encoded]) -> torch.Tensor:
        lengths = np.array([max(1, len(each)) for each in encoded])  # a prompt may have no token
        longest = int(lengths.max())
        ids = np.full((len(encoded), longest), _pad_id(self), dtype=np.int64)
        for row, each in enumerate(encoded):
            ids[row, : len(each)] = each
        mask = np.arange(longest)[None, :] < lengths[:, None]
        found: torch.Tensor = self.model(
            input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask.astype(np.int64))
        ).logits
        return found


def train_classifier(
    prompts: Sequence[Prompt], tokens: Sequence[int], start: Classifier, options: TuningOptions
) -> Classifier:
    """Train `start` (of `from_nothing` or `pretrained`) itself on rows [rows]."""
    examples = [
        Example(encoded, length)
        for encoded, length in zip(start.encode(prompts), tokens, strict=True)
    ]
    _train(start, examples, options, lambda: None)
    return replace(start, trained_rows=len(examples))


def from_nothing(
    buckets: tuple[int, ...], vocab_size: int, tokenizer: str, seed: int = 0
) -> Classifier:
    """An untrained classifier of two small layers for ids of a vocabulary of this size."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=_FIRST_ID + min(vocab_size, FOLDED_VOCABULARY),
        max_position_embeddings=MOST_TOKENS,
        n_layers=2,
        n_heads=4,
        dim=64,
        hidden_dim=256,
        dropout=0.1,
        attention_dropout=0.1,
        seq_classif_dropout=0.1,
        pad_token_id=_PAD,
    )
    config.num_labels = len(buckets)
    with _seeded(seed):
        model = DistilBertForSequenceClassification(config).eval()
    return Classifier(buckets, model, None, tokenizer, 0)


def pretrained(reference: str, buckets: tuple[int, ...], seed: int = 0) -> Classifier:
    """The pretrained model in a folder or of a hub id, with an untrained head for these buckets.

    SpecError where it is none of transformers' sequence classifications, or brings code of its own.
    """
    from quant.checkpoint.model_reference import resolve

    folder = resolve(reference)
    with _seeded(seed):
        model = _pretrained(folder, len(buckets), new_head=True)
    return Classifier(buckets, model, _own_tokenizer(folder), None, 0)


def _train(
    classifier: Classifier, examples: Sequence[Example], options: TuningOptions, rest: Rest
) -> None:
    """Steps of AdamW with a rate that falls to nothing; `rest` after each."""
    model = classifier.model
    usual_rate = TUNED_LEARNING_RATE if classifier.reads_text else LEARNING_RATE
    rate = options.learning_rate or usual_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=_WEIGHT_DECAY)
    batches = -(-len(examples) // BATCH_ROWS)
    epochs = options.epochs or max(EPOCHS, -(-LEAST_STEPS // batches))
    total = epochs * batches
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    draw = np.random.default_rng(options.seed)
    labels = buckets_of([each.tokens for each in examples], classifier.buckets)
    with _seeded(options.seed), torch.enable_grad():
        model.train()
        for _ in range(epochs):
            order = draw.permutation(len(examples))
            for begin in range(0, len(order), BATCH_ROWS):
                rows = order[begin : begin + BATCH_ROWS]
                logits = classifier._logits([examples[row].encoded for row in rows])
                loss = cross_entropy(logits, torch.from_numpy(labels[rows]))
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                rest()
        model.eval()


def _folded(ids: Sequence[int], vocabulary: int) -> Encoded:
    """Ids folded into `vocabulary` after a class token, of a long prompt the first and the last."""
    room = MOST_TOKENS - 1
    if len(ids) > room:
        ids = (*ids[: room // 2], *ids[-(room - room // 2) :])
    kept = np.array(ids, dtype=np.int64) % vocabulary + _FIRST_ID
    return np.concatenate([[_CLASS], kept]).astype(np.int32)


def _pad_id(classifier: Classifier) -> int:
    found = getattr(classifier.own_tokenizer, "pad_token_id", None)
    return _PAD if found is None else int(found)


def _positions(model: Any) -> int:
    """Tokens of a prompt that the model has positions for; RoBERTa's begin after its padding."""
    found = getattr(model.config, "max_position_embeddings", None)
    return MOST_TOKENS if found is None else int(found) - 2


def _pretrained(folder: Path, labels: int, new_head: bool = False) -> Any:
    """A model in eval mode, float32, with so many labels."""
    from transformers import AutoModelForSequenceClassification

    try:
        model, told = AutoModelForSequenceClassification.from_pretrained(
            folder,
            num_labels=labels,
            ignore_mismatched_sizes=new_head,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        raise SpecError(
            f"{folder} cannot be loaded as a classifier of transformers: {error}; give one such as "
            "DistilBERT with its weights as safetensors"
        ) from error
    missing = sorted(told["missing_keys"])
    if missing and not new_head:
        raise SpecError(f"{folder} has no weights {missing[0]}; train the predictor again")
    return model.eval()


def _own_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise SpecError(
            f"the tokenizer in {folder} cannot be loaded: {error}; a classifier needs its own "
            "beside its weights"
        ) from error


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw weights and dropout from `seed`, and leave torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
