"""Rows whose answers end where nobody knows before: their lengths, and predictions of these."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.reproduction.orca.traces import recorded_tokens
from llmpq.lengths.predictor import even_buckets

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

BUCKETS = 10
"""Classes of S³'s predictor, a tenth of the longest answer each (section 3)."""

CLASS_QUANTILES = (0.25, 0.5, 0.75, 0.99)
"""Quantiles of the answers that part the classes of the recorded predictions."""

LONGEST = 2048
"""Tokens of the longest sequence of the paper's models."""
MEAN_PROMPT, MEAN_ANSWER = 24, 50
"""Tokens of short questions and answers in the mean. Over the time that rows hold memory their mean
is 106 tokens then: where table 3's memory has room for 4 sequences of 2,048 tokens, Oracle has
77.35 rows in it. Alpaca's instructions have about 20 words."""
SPREAD = 0.7
"""Standard deviation of the logarithm of lognormal lengths."""


@dataclass(frozen=True)
class Rows:
    """Prompt and answer tokens of every row [rows], and the most that any answer may have.

    `bounds` [buckets]: the most answer tokens of each bucket of a predictor. `predicted` [rows]:
    answer tokens as a recorded classifier expects them, where there is one.
    """

    name: str
    prompts: IntArray
    answers: IntArray
    limit: int
    bounds: IntArray
    predicted: IntArray | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def deciles(self) -> IntArray:
        """The greatest answer of each of ten buckets, which have as many rows each."""
        return np.array(even_buckets(self.answers, int(self.answers.max())), dtype=np.int64)

    @cached_property
    def longest(self) -> int:
        """Tokens that the longest prompt and the longest answer have together."""
        return int(self.prompts.max()) + self.limit

    def bucket_of(self, answers: IntArray) -> IntArray:
        """The bucket of each answer [rows]."""
        return np.searchsorted(self.bounds, answers)

    def accuracy(self, expected: IntArray) -> float:
        """The share of rows that are expected in the bucket that they are in."""
        return float((self.bucket_of(expected) == self.bucket_of(self.answers)).mean())

    def expected_by(self, confusion: FloatArray, seed: int) -> IntArray:
        """Answer tokens [rows] that a predictor of this confusion matrix expects: row b has the
        probabilities of the predicted buckets for an answer of bucket b.
        """
        drawn = np.random.default_rng([seed, 3]).random(len(self))
        chances = confusion.cumsum(axis=1)[self.bucket_of(self.answers)]
        predicted = (drawn[:, None] > chances).sum(axis=1)
        return self.bounds[np.minimum(predicted, len(self.bounds) - 1)]


def recorded(data: Path, count: int, seed: int) -> Rows:
    """Answers of Vicuna-13B with the predictions of a BERT classifier, whose prompts are drawn from
    a trace of conversations, as the file has none.

    A class stands for the answers between two quantiles; its greatest is what is expected.
    """
    path = data / "lengths" / "vicuna13b_predictions.csv"
    table = np.loadtxt(path, np.int64, delimiter=",", skiprows=1)
    bounds = np.quantile(table[:, 0], CLASS_QUANTILES).astype(np.int64)
    limit = int(table[:, 0].max())
    random = np.random.default_rng([seed, 1])
    answers, classes = random.choice(table, count).T
    bounds = np.append(bounds, limit)
    prompts = _prompts(data, random, count)
    return Rows("vicuna", prompts, answers, limit, bounds, bounds[classes])


def _prompts(data: Path, random: np.random.Generator, count: int) -> IntArray:
    """Prompts of recorded conversations, scaled so that their 99th percentile is 512 tokens."""
    tokens = recorded_tokens(data, "conv")[:, 0]
    scaled = np.rint(tokens * (512 / np.percentile(tokens, 99))).astype(np.int64)
    return random.choice(np.clip(scaled, 1, 512), count)


def short_answers(count: int, seed: int) -> Rows:
    """Lengths like Alpaca's, of a model whose sequences may have 2,048 tokens."""
    random = np.random.default_rng([seed, 1])
    prompts = _lognormal(random, count, MEAN_PROMPT, LONGEST // 4)
    answers = _lognormal(random, count, MEAN_ANSWER, LONGEST // 2)
    limit = LONGEST - int(prompts.max())
    return Rows("short answers", prompts, answers, limit, tenths(limit))


def long_prompts(count: int, seed: int) -> Rows:
    """Prompts of 64 to 1,024 tokens with answers of at most 16."""
    random = np.random.default_rng([seed, 1])
    prompts, answers = random.integers(64, 1025, count), random.integers(1, 17, count)
    return Rows("long prompts", prompts, answers, 16, np.array([16]))


def _lognormal(random: np.random.Generator, count: int, mean: float, most: int) -> IntArray:
    drawn = random.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count)
    return np.clip(np.rint(drawn), 1, most).astype(np.int64)


def tenths(limit: int) -> IntArray:
    """The greatest answer of each bucket [buckets]."""
    return -(-limit * np.arange(1, BUCKETS + 1) // BUCKETS)


def confusion_of(accuracy: float, near: float) -> FloatArray:
    """A confusion matrix [buckets, buckets] with this share of right predictions; of the wrong
    ones the share `near` is in a neighbouring bucket, the others anywhere.
    """
    at = np.arange(BUCKETS)
    distance = np.abs(at[:, None] - at)
    wrong = np.zeros((BUCKETS, BUCKETS))
    for share, chosen in ((near, distance == 1), (1 - near, distance > 0)):
        wrong += share * chosen / chosen.sum(axis=1, keepdims=True)
    return accuracy * np.eye(BUCKETS) + (1 - accuracy) * wrong
