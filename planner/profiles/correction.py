"""Correcting fitted layer times by what was measured near a workload.

Kernels behave differently at different numbers of rows, and caches at different sizes, which a few
fitted terms cannot express. The residual varies smoothly with the logarithms of batch and length:
near measured workloads it is predicted (by a Gaussian process, as in the design of experiments),
and far from them the terms stand alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

# With fewer workloads a residual cannot be told from noise.
LEAST_POINTS = 8
# In natural logarithms: workloads within a factor of 2, 4 or 12 of each other behave alike.
_LENGTH_SCALES = (0.7, 1.4, 2.5)
# Variance of the measurements' noise, relative to that of the residual.
_NOISES = (0.02, 0.1, 0.4, 1.5)


@dataclass(frozen=True)
class Correction:
    """A correction factor by batch size and length: `points` [n, 2], logarithms; `weights` [n]."""

    points: Matrix
    weights: Vector
    length_scale: float

    def factor(self, batch_size: int, length: int) -> float:
        """The factor for the fitted time; 1 far from every point."""
        if not len(self.weights):
            return 1.0
        kernel = _kernel(_logarithms([(batch_size, length)]), self.points, self.length_scale)
        return float(np.exp(kernel[0] @ self.weights))


NO_CORRECTION = Correction(np.empty((0, 2)), np.empty(0), 1.0)


def fit_correction(workloads: Sequence[tuple[int, int]], ratios: Vector) -> Correction:
    """Fit a correction to `ratios` [n] of measured to fitted time, by what predicts each point best
    from the others; none where that is better.
    """
    if len(workloads) < LEAST_POINTS:
        return NO_CORRECTION
    points, residuals = _logarithms(workloads), np.log(ratios)
    best, least = NO_CORRECTION, float(np.mean(residuals**2))
    for length_scale in _LENGTH_SCALES:
        kernel = _kernel(points, points, length_scale)
        for noise in _NOISES:
            inverse = np.linalg.inv(kernel + noise * np.eye(len(points)))
            weights = np.asarray(inverse @ residuals, dtype=np.float64)
            left_out = float(np.mean((weights / np.diag(inverse)) ** 2))
            if left_out < least:
                best, least = Correction(points, weights, length_scale), left_out
    return best


def _logarithms(workloads: Sequence[tuple[int, int]]) -> Matrix:
    """The logarithms `[n, 2]`; a length of 0, before the first token of an answer, counts as 1."""
    return np.log(np.maximum(np.array(workloads, dtype=np.float64), 1.0))


def _kernel(left: Matrix, right: Matrix, length_scale: float) -> Matrix:
    """The similarity `[left, right]` of workloads, 1 where they are equal."""
    squares = ((left[:, None] - right[None]) ** 2).sum(axis=-1)
    return np.asarray(np.exp(-squares / (2 * length_scale**2)))
