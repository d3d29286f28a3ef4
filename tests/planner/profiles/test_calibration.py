"""What sensitivities read in nats a token: lines through one bitwidth for all, of any unit."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from pydantic import ValidationError

from planner.model.finding import model_shape
from planner.plan.parts import DivergenceScale
from planner.profiles.calibration import FACTOR, MARGIN, expected_nats, scale_of
from planner.profiles.omega_file import Matrix
from planner.profiles.sensitivity import DEFAULT_SOURCE, Omega, default_sensitivity
from quant.scheme import BITWIDTHS

SHAPE = model_shape("opt-125m")
SIZES = default_sensitivity(SHAPE, BITWIDTHS)


def read(matrix: Matrix, bits: list[int], unit: float = 1.0) -> float:
    """Nats of a plan with these bits of its layers, sensitivities being in another unit."""
    scale = scale_of(Omega(matrix * unit, DEFAULT_SOURCE), SHAPE, "weighted", BITWIDTHS)
    columns = [BITWIDTHS.index(each) for each in bits]
    return scale.at(float((matrix * unit)[range(len(bits)), columns].sum()))


@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e9])
def test_mixtures_lie_on_lines_between_bitwidths(unit: float) -> None:
    nats = {bits: expected_nats(SHAPE, "weighted", bits) for bits in BITWIDTHS}
    assert nats[3] > nats[4] > nats[5] > nats[6] > nats[8] > nats[16] == 0
    for bits in BITWIDTHS:
        assert read(SIZES, [bits] * 12, unit) == pytest.approx(nats[bits])
    for low, high in pairwise(BITWIDTHS):
        half = read(SIZES, [low, high] * 6, unit)
        assert half == pytest.approx((nats[low] + nats[high]) / 2)


def test_layers_that_lose_nothing_read_as_nothing() -> None:
    scale = scale_of(
        Omega(np.zeros((12, len(BITWIDTHS))), "mine.json"), SHAPE, "weighted", BITWIDTHS
    )
    assert (scale.points, scale.basis, scale.at(0.0), scale.at(1.0)) == ((), "no unit", 0, 0)


def test_nats_of_a_file_stand_as_they_are() -> None:
    scale = scale_of(Omega(SIZES, "mine.json", in_nats=True), SHAPE, "weighted", BITWIDTHS)
    assert (scale.at(0.02), scale.at(3.0), scale.basis) == (0.02, 3.0, "layers")


def test_larger_models_and_finer_rounding_lose_less() -> None:
    larger = [expected_nats(model_shape(name), "weighted", 4) for name in ("opt-1.3b", "opt-66b")]
    own = expected_nats(SHAPE, "weighted", 4)
    assert own > larger[0] > larger[1] > own / 10
    assert expected_nats(SHAPE, "nearest", 4) > own == expected_nats(SHAPE, "gptq", 4)


@pytest.mark.parametrize(
    ("name", "bits", "nats"),
    [  # of llama.cpp's tools/perplexity/README.md: Q8_0, Q4_K_S or _M and Q3_K_S
        ("llama-3-8b", 8, 0.001355),
        ("llama-3-8b", 4, 0.031951),
        ("llama-3-8b", 3, 0.199821),
        ("llama-2-7b", 8, 0.000369),
        ("llama-2-7b", 4, 0.012686),
        ("llama-2-70b", 4, math.log(1.0157)),  # of perplexities
        ("llama-2-70b", 3, math.log(1.0789)),
    ],
)
def test_published_divergences_are_within_what_is_stated(name: str, bits: int, nats: float) -> None:
    expected = expected_nats(model_shape(name), "weighted", bits)
    assert expected / FACTOR - MARGIN <= nats <= expected * FACTOR + MARGIN


def test_points_that_do_not_ascend_are_refused() -> None:
    scale = DivergenceScale(((0.5, 0.1), (1.0, 0.2)), 2.0, 0.0, "sizes", "default")
    for points in (((1.0, 0.2), (0.5, 0.1)), ((0.0, 0.1),)):
        with pytest.raises(ValidationError, match="points must ascend"):
            replace(scale, points=points)
