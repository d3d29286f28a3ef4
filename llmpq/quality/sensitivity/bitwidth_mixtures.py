"""Assignments of bitwidths whose perplexity is measured, to read sensitivities by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from quant.scheme import FULL_BITS
from quant.sensitivity.indicators import Matrix

SHARES = (0.7, 0.4, 0.23, 0.13, 0.07, 0.04)
"""Shares of the sensitivity at the lowest bitwidth at which mixtures are measured, evenly spread on
the logarithmic scale on which the curve is fitted."""

Bits = tuple[int, ...]


def assignments_to_measure(matrix: Matrix, bitwidths: Sequence[int]) -> list[Bits]:
    """16 bit, every lower bitwidth for all layers, and mixtures; each once, 16 bit first.

    `matrix` [L, K], K ascending `bitwidths`. The mixtures are those of least sensitivity, as a
    planner's are: choosing by an indicator prefers the layers that it underestimates, and such
    mixtures cost more than others of the same sum (a fifth to a half more on the demo model).
    """
    layers = len(matrix)
    found: dict[Bits, None] = {(FULL_BITS,) * layers: None}
    found |= {(bits,) * layers: None for bits in reversed(bitwidths) if bits != FULL_BITS}
    found |= dict.fromkeys(_mixtures(matrix, bitwidths))
    return list(found)


def _mixtures(matrix: Matrix, bitwidths: Sequence[int]) -> Iterator[Bits]:
    """Assignments at which the sum first is within each of `SHARES`.

    From the lowest bitwidth on, that layer is raised whose next step saves most sensitivity for a
    bit a weight.
    """
    rows = np.arange(len(matrix))
    gain = (matrix[:, :-1] - matrix[:, 1:]) / np.diff(bitwidths)
    gain = np.column_stack([gain, np.full(len(matrix), -np.inf)])  # no step from the last
    choice = np.zeros(len(matrix), dtype=np.int64)
    for share in SHARES:
        while (
            matrix[rows, choice].sum() > share * matrix[:, 0].sum()
            and np.isfinite(gain[rows, choice]).any()
        ):
            choice[gain[rows, choice].argmax()] += 1
        yield tuple(bitwidths[index] for index in choice.tolist())
