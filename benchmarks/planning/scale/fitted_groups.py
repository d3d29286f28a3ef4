"""Factors of the cost model that fit measured groups, held near the datasheet's values.

Most fixed seconds of a layer and of a sum, and the rates of memory and links, cannot be told apart
from measurements of one degree. So a factor is taken as known beforehand, 1 within a share: close
for the shares of arithmetic and bandwidth that large kernels reach, loosely for latencies and links
(maximum a posteriori; lognormal). Errors count by their size beyond a tenth and by their square
below (pseudo-Huber), so that rows beyond the formulas do not bend the factors to them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from benchmarks.planning.scale.measured_groups import (
    Factors,
    FloatArray,
    Row,
    measured_s,
    predicted_s,
)

KNOWN = Factors(arithmetic=0.1, bandwidth=0.1, layer=0.5, sum=0.5, link=0.5, large_sums=1.0)
"""Standard deviations of the factors' logarithms before anything is measured."""
_USUAL_ERROR = 0.1


def fitted(rows: Sequence[Row], looseness: float = 1.0) -> Factors:
    """The factors that fit `rows`, which may be off by `looseness` times `KNOWN`."""
    measured = measured_s(rows)
    spreads = looseness * np.exp(KNOWN.logarithms)

    def residuals(logarithms: FloatArray) -> FloatArray:
        predicted = predicted_s(rows, Factors.from_logarithms(logarithms))
        errors = np.log(predicted / measured).ravel() / _USUAL_ERROR
        return np.concatenate([_huber(errors), logarithms / spreads])

    found = least_squares(residuals, np.zeros(len(spreads)))
    return Factors.from_logarithms(found.x)


def _huber(errors: FloatArray) -> FloatArray:
    """Values whose squares grow as those of `errors` up to 1, and as their sizes beyond."""
    squares: FloatArray = 2 * (np.sqrt(1 + errors**2) - 1)
    return np.sign(errors) * np.sqrt(squares)
