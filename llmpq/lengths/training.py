"""Training a predictor on finished rows, and judging one by rows that it has not seen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from llmpq.lengths.predictor import (
    BUCKETS,
    Agreement,
    BucketModel,
    IntArray,
    agreement,
    buckets_of,
    confusion_of,
    even_buckets,
    likeliest,
)
from planner.option_rules import option
from quant.common.errors import SpecError

if TYPE_CHECKING:
    from llmpq.lengths.finished_rows import LearntRow

Kind = Literal["boosting", "classifier"]
KINDS: tuple[Kind, ...] = ("boosting", "classifier")

LEAST_ROWS = 20
"""Fewer finished rows hold out too few to say anything."""

HELD_OUT = 0.2
"""Share of the rows that a predictor does not learn from."""

_PROMPTS_AT_ONCE = 16
"""As many as a run predicts together."""


@dataclass(frozen=True)
class TrainingOptions:
    kind: Kind = option(KINDS, "trees, or a transformer", KINDS[0])
    base: str | None = option(
        "MODEL",
        "folder or hub id of a pretrained classifier such as DistilBERT (default: none, it is "
        "trained anew)",
    )
    buckets: int = option("COUNT", "buckets of lengths", BUCKETS)
    longest: int | None = option("TOKENS", "most tokens of an answer (default: the longest one)")
    epochs: int | None = option(
        "COUNT", "times that a classifier sees each row (default: 10, more of few rows)"
    )
    seed: int = option("SEED", "of held-out rows and of the training", 0)

    def __post_init__(self) -> None:
        least = {"buckets": 2, "longest": 2, "epochs": 1, "seed": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise SpecError(f"{name} is {value}; give {bound} or more")


ServedIds = tuple[str, int]
"""The ids that prompts have: digest of their tokenizer, and size of its vocabulary."""


@dataclass(frozen=True)
class Judgement:
    """How a predictor did on rows: `confusion` `[buckets][buckets]`, true by predicted.

    `ms_per_prompt`: milliseconds of this machine in batches as a run makes. `majority` always takes
    the bucket that most rows are of, `longest` always the last one.
    """

    confusion: IntArray
    predictor: Agreement
    majority: Agreement
    longest: Agreement
    ms_per_prompt: float


def train(
    rows: Sequence[LearntRow], options: TrainingOptions, ids: ServedIds | None
) -> tuple[BucketModel, Judgement]:
    """Train on four fifths of `rows`, and judge by the others. `ids` None: prompts are texts alone.

    SpecError for too few rows, or rows that are all of one bucket.
    """
    if len(rows) < LEAST_ROWS:
        raise SpecError(
            f"there are {len(rows)} finished rows to learn from; give at least {LEAST_ROWS}"
        )
    longest = options.longest or max(each.tokens for each in rows)
    seen, unseen = _parted(rows, options.seed)
    learnt = [each.tokens for each in seen]
    buckets = even_buckets(learnt, longest, options.buckets)
    found = buckets_of(learnt, buckets)
    if len(set(found.tolist())) < 2:
        raise SpecError(
            f"all {len(seen)} answers to learn from are in one bucket, of at most "
            f"{buckets[found[0]]} tokens; there is nothing to predict: plan and run without a "
            "predictor, or give more --buckets"
        )
    model = _trained(seen, buckets, options, ids)
    majority = int(np.bincount(found).argmax())
    return model, judge(model, unseen, majority)


def judge(model: BucketModel, rows: Sequence[LearntRow], majority: int | None = None) -> Judgement:
    """Judge `model` by `rows`; `majority` is the bucket that most rows are of (None: of these)."""
    began_s = time.perf_counter()
    prompts = [each.prompt for each in rows]
    batches = [
        model.probabilities(model.encode(prompts[at : at + _PROMPTS_AT_ONCE]))
        for at in range(0, len(prompts), _PROMPTS_AT_ONCE)
    ]
    seconds = time.perf_counter() - began_s
    probabilities = np.concatenate(batches)
    predicted = likeliest(probabilities)
    true = buckets_of([each.tokens for each in rows], model.buckets)
    most = int(np.bincount(true).argmax()) if majority is None else majority
    last = len(model.buckets) - 1
    return Judgement(
        confusion=confusion_of(true, predicted, len(model.buckets)),
        predictor=agreement(true, predicted, probabilities.max(axis=1)),
        majority=agreement(true, np.full(len(true), most)),
        longest=agreement(true, np.full(len(true), last)),
        ms_per_prompt=1e3 * seconds / len(rows),
    )


def _parted(rows: Sequence[LearntRow], seed: int) -> tuple[list[LearntRow], list[LearntRow]]:
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    held = max(1, round(HELD_OUT * len(rows)))
    seen, unseen = sorted(order[held:]), sorted(order[:held])
    return [rows[place] for place in seen], [rows[place] for place in unseen]


def _trained(
    rows: Sequence[LearntRow],
    buckets: tuple[int, ...],
    options: TrainingOptions,
    ids: ServedIds | None,
) -> BucketModel:
    prompts, tokens = [each.prompt for each in rows], [each.tokens for each in rows]
    if options.kind == "boosting":
        from llmpq.lengths.boosting import TreeOptions, train_boosting

        digest = None if ids is None else ids[0]
        return train_boosting(prompts, tokens, buckets, digest, TreeOptions(seed=options.seed))
    from llmpq.lengths import classifier

    if options.base is not None:
        if not any(each.text for each in prompts):
            raise SpecError(
                "a pretrained classifier reads texts, and the model has no tokenizer to make them "
                "of token ids; leave out --base"
            )
        start = classifier.pretrained(options.base, buckets, options.seed)
    elif ids is None:
        raise SpecError(
            "a classifier that is trained from nothing reads token ids; name the model whose "
            "tokenizer makes them (--model), or a pretrained classifier (--base)"
        )
    else:
        digest, vocab_size = ids
        start = classifier.from_nothing(buckets, vocab_size, digest, options.seed)
    tuning = classifier.TuningOptions(options.epochs, seed=options.seed)
    return classifier.train_classifier(prompts, tokens, start, tuning)
