"""Buckets of output lengths, and how predicted ones agree with the true ones (S³ section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BUCKETS = 10
"""Buckets of the paper, each of a tenth of the longest answer (section 3)."""

_CALIBRATION_BINS = 10

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def even_buckets(longest: int, count: int = BUCKETS) -> tuple[int, ...]:
    """The most tokens of each of `count` buckets of the same width, the last one `longest`.

    They are fewer where `longest` is less than `count`.
    """
    ends = {-(-longest * number // count) for number in range(1, count + 1)}
    return tuple(sorted(ends))


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
    error = 0.0
    for number in range(_CALIBRATION_BINS):
        chosen = bins == number
        if chosen.any():
            gap = abs(float(right[chosen].mean()) - float(confidence[chosen].mean()))
            error += gap * float(chosen.mean())
    return error
