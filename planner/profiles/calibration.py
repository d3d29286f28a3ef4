"""What sensitivities mean in nats a token, where no layer of the model was measured in them.

A model's divergence with all layers at one bitwidth is that of a model that was measured, times a
power of their sizes; sums of sensitivities between these are read by straight lines, as noise of
layers adds up. `benchmarks.quantization.forecast` measures what it rests on and how far it is off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from planner.model.shape import ModelShape
from planner.plan.parts import DivergenceScale
from planner.profiles.sensitivity import DEFAULT_SOURCE, HEAD_SHARE, Omega
from quant.scheme import FULL_BITS, GPTQ, NEAR_FULL_BITS, WEIGHTED

FACTOR, FACTOR_ELSE = 3.3, 5.1
"""How far off a model was at the most, of those that were measured and of those that are published;
and the same where weights are not rounded by what they multiply. `docs/quantization.md` has them.
"""

MARGIN = 0.003
"""Nats beyond that: what 8 bit loses, far below a percent of perplexity, differs by more."""

LAYERS_FACTOR = 1.7
"""The same of sums over layers that were measured one at a time."""

SMALLEST = 135e6
"""Parameters of SmolLM2, below which models were not seen to lose more."""

EXPONENT = -0.22
"""Of the parameters that a token uses, by divergences that are published for models of 7 to 70
billion; `docs/quantization.md` names them."""

_NATS: dict[str, dict[int, float]] = {
    WEIGHTED: {3: 0.15, 4: 0.031, 5: 0.0076, 6: 0.0023, 8: 0.0007},
    "nearest": {3: 0.41, 4: 0.075, 5: 0.018, 6: 0.0045, 8: 0.001},
    "stochastic": {3: 1.1, 4: 0.16, 5: 0.04, 6: 0.0091, 8: 0.0016},
}
"""Nats a token by the rounding of weights and their bits: of SmolLM2 and the demo model the
geometric mean, by `benchmarks.quantization.forecast --anchors`."""


def expected_nats(shape: ModelShape, rounding: str, bits: int) -> float:
    """The divergence with all layers at these bits."""
    if bits == FULL_BITS:
        return 0.0
    size = max(shape.active_parameters / SMALLEST, 1.0)
    nats = _NATS[WEIGHTED if rounding == GPTQ else rounding][bits]
    return nats * math.pow(size, EXPONENT)


def scale_of(
    omega: Omega, shape: ModelShape, rounding: str, bitwidths: Sequence[int]
) -> DivergenceScale:
    """How sums of sensitivities at ascending `bitwidths` read in nats a token: as they stand, else
    by the calibration, whatever their unit.
    """
    if omega.in_nats:
        return DivergenceScale(((1.0, 1.0),), LAYERS_FACTOR, 0.0, "layers", omega.source)
    points: list[tuple[float, float]] = []
    for summed, bits in zip(reversed(omega.matrix.sum(axis=0)), reversed(bitwidths), strict=True):
        if summed > (points[-1][0] if points else 0.0):
            points.append((float(summed), expected_nats(shape, rounding, bits)))
    ends = omega.head.get(NEAR_FULL_BITS)
    if not points and ends:  # of embedding and LM head alone, at as many bits
        points.append((ends / HEAD_SHARE, expected_nats(shape, rounding, NEAR_FULL_BITS)))
    factor = FACTOR if rounding in (WEIGHTED, GPTQ) else FACTOR_ELSE
    basis: Literal["no unit", "sizes"] = "sizes" if omega.source == DEFAULT_SOURCE else "no unit"
    return DivergenceScale(tuple(points), factor, MARGIN, basis, omega.source)
