"""What a predictor of output lengths is, how its buckets agree with true lengths (S³ section 3),
and the kinds that need no training.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from quant.common.errors import SpecError

BUCKETS = 10
"""As many as the paper has (section 3)."""

_CALIBRATION_BINS = 10

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def even_buckets(
    lengths: Sequence[int] | IntArray, longest: int, count: int = BUCKETS
) -> tuple[int, ...]:
    """The most tokens of up to `count` buckets with as many of `lengths` each, and of the last one
    `longest`. The paper's are of one width, so that most short answers are in the first one.
    """
    shares = np.arange(1, count) / count
    ends = np.quantile(np.minimum(lengths, longest), shares, method="inverted_cdf")
    return tuple(sorted({*ends.astype(np.int64).tolist(), longest}))


def buckets_of(lengths: Sequence[int] | IntArray, buckets: Sequence[int]) -> IntArray:
    """The bucket of each length [lengths]: the first with room for it, else the last."""
    found = np.searchsorted(np.asarray(buckets), np.asarray(lengths, dtype=np.int64))
    return np.asarray(np.minimum(found, len(buckets) - 1), dtype=np.int64)


def confusion_of(true: IntArray, predicted: IntArray, count: int) -> IntArray:
    """Rows by their true bucket and the predicted one, `[count][count]`."""
    counts = np.zeros((count, count), dtype=np.int64)
    np.add.at(counts, (true, predicted), 1)
    return counts


@dataclass(frozen=True)
class Agreement:
    """How well predicted buckets of `rows` rows agree with the true ones.

    `accuracy`: share of the right ones; `too_short`: share of those predicted below the true one,
    which outgrow what is reserved. `wrong_distance`: buckets between the true and the predicted one
    in the mean of wrong ones, None where none is. `calibration_error`: mean distance between how
    sure a prediction is and how often such predictions are right (expected calibration error, ten
    bins), None where predictions do not tell.
    """

    rows: int
    accuracy: float
    too_short: float
    wrong_distance: float | None
    calibration_error: float | None = None


def agreement(
    true: IntArray, predicted: IntArray, confidence: FloatArray | None = None
) -> Agreement:
    """The agreement of buckets [rows], of which there is at least one."""
    right = true == predicted
    distance = np.abs(true - predicted)[~right]
    return Agreement(
        rows=len(true),
        accuracy=float(right.mean()),
        too_short=float((predicted < true).mean()),
        wrong_distance=float(distance.mean()) if len(distance) else None,
        calibration_error=None if confidence is None else calibration_error(right, confidence),
    )


def calibration_error(right: npt.NDArray[np.bool_], confidence: FloatArray) -> float:
    """Mean over predictions [rows] of |share of right ones - mean confidence| of their bin."""
    bins = np.minimum((confidence * _CALIBRATION_BINS).astype(np.int64), _CALIBRATION_BINS - 1)
    gaps = np.bincount(bins, right - confidence)  # of a bin's means, times its number of rows
    return float(np.abs(gaps).sum() / len(right))


Encoded = npt.NDArray[Any]
"""What a trained predictor keeps of a prompt, in the form in which it computes with it."""


@dataclass(frozen=True)
class Prompt:
    """A prompt whose answer has at most `limit` tokens.

    `token_ids` are those of the served model's tokenizer, `text` their text; either may be empty
    for predictors that do not read it.
    """

    custom_id: str
    limit: int
    token_ids: tuple[int, ...] = ()
    text: str = ""


Rest = Callable[[], None]
"""Is called after every piece of a training; may wait, and may end it by an error."""


@dataclass(frozen=True)
class Example:
    """A prompt, and how many tokens its answer had."""

    encoded: Encoded
    tokens: int


class BucketModel(Protocol):
    """A trained predictor, which tells how probable each bucket is.

    `kind` is as in `PredictorFile`. `buckets` `[buckets]`: the most tokens of each, ascending.
    `tokenizer`: the digest of the tokenizer whose ids it reads, None where it reads none.
    `trained_rows`: rows it has learnt from.
    """

    @property
    def kind(self) -> Literal["classifier", "boosting"]: ...
    @property
    def buckets(self) -> tuple[int, ...]: ...
    @property
    def tokenizer(self) -> str | None: ...
    @property
    def reads_text(self) -> bool: ...
    @property
    def trained_rows(self) -> int: ...

    def encode(self, prompts: Sequence[Prompt]) -> list[Encoded]: ...

    def probabilities(self, encoded: Sequence[Encoded]) -> FloatArray:
        """Probability of each bucket, `[prompts, buckets]`."""

    def improved(self, examples: Sequence[Example], rest: Rest) -> Self:
        """Another one that has learnt from `examples` too; this one stays as it is."""

    def save(self, folder: Path) -> None:
        """Write its weights into `folder`, as safetensors and JSON."""


def expected_tokens(
    model: BucketModel, encoded: Sequence[Encoded], limits: Sequence[int]
) -> list[int]:
    """The most tokens of the most probable bucket of each prompt, at most its limit [prompts].

    Raises ValueError where the model's probabilities are not finite.
    """
    most = np.asarray(model.buckets)[likeliest(model.probabilities(encoded))]
    return [int(each) for each in np.minimum(most, limits)]


def likeliest(probabilities: FloatArray) -> npt.NDArray[np.int64]:
    """The most probable bucket of each prompt [prompts]; ValueError for NaN."""
    if not np.isfinite(probabilities).all():
        raise ValueError("its probabilities are not finite (NaN)")
    return np.asarray(probabilities.argmax(axis=1), dtype=np.int64)


@dataclass(frozen=True)
class Known:
    """Expects what `tokens` says by `custom_id`, and as many as it may have of any other prompt.

    With true lengths it is the oracle of studies, with those of a file (`trace`) any predictor,
    without any that of the longest answers.
    """

    tokens: Mapping[str, int] = field(default_factory=dict)

    def expect(self, prompts: Sequence[Prompt]) -> list[int]:
        """New tokens that are expected of each prompt [prompts], 1 to its limit."""
        return [
            max(1, min(self.tokens.get(each.custom_id, each.limit), each.limit)) for each in prompts
        ]


class Confused:
    """Errs as a confusion matrix says: expects the most tokens of a bucket that is drawn.

    `true`: answers' tokens by `custom_id`. `confusion` `[buckets][buckets]`: weights of the
    predicted buckets (columns) by the true one (row). A draw depends on `seed` and `custom_id`
    alone. Raises SpecError for weights that are negative, not finite, or none at all.
    """

    def __init__(
        self,
        true: Mapping[str, int],
        buckets: Sequence[int],
        confusion: Sequence[Sequence[float]],
        seed: int = 0,
    ) -> None:
        weights = np.asarray(confusion, dtype=np.float64)
        if weights.shape != (len(buckets), len(buckets)):
            raise SpecError(
                f"confusion is {list(weights.shape)}; it must have {len(buckets)} rows and columns,"
                " one for each bucket"
            )
        if not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum(axis=1).all():
            raise SpecError("confusion: every row needs weights of 0 or more, and one above 0")
        self._true, self._buckets, self._seed = true, tuple(buckets), seed
        self._shares = np.cumsum(weights, axis=1) / weights.sum(axis=1, keepdims=True)

    def expect(self, prompts: Sequence[Prompt]) -> list[int]:
        """The tokens drawn; a prompt without a true length gets its limit."""
        return [self._expected(each) for each in prompts]

    def _expected(self, prompt: Prompt) -> int:
        true = self._true.get(prompt.custom_id)
        if true is None:
            return prompt.limit
        row = self._shares[buckets_of([true], self._buckets)[0]]
        name = zlib.crc32(prompt.custom_id.encode("utf-8", "backslashreplace"))
        drawn = np.random.default_rng((self._seed, name)).random()
        found = int(np.searchsorted(row, drawn, side="right"))
        return min(prompt.limit, self._buckets[min(found, len(self._buckets) - 1)])
