"""The error of stored weights against float64, and its scaling to nats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.common.errors import CheckpointError
from quant.rounding.canonical import dequantize, quantize
from quant.rounding.importance import InputStatistics
from quant.rounding.indicators import ErrorStatistics, in_nats, weighted_square
from quant.rounding.ways import Rounding

BITS = (3, 4, 8, 16)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(name: str, weight: Tensor, bits: int, inputs: InputStatistics) -> Tensor:
    return dequantize(quantize(weight, bits, rounding=Rounding(inputs=inputs)))


def test_error_is_that_of_float64_and_falls_with_bits() -> None:
    inputs = {"a": normal(50, 128, seed=1) * normal(128, seed=2).exp(), "c": normal(50, 64, seed=3)}
    weights = {"a": normal(96, 128, seed=4), "b": normal(32, 128, seed=5), "c": normal(8, 64)}
    source_of = {"a": "a", "b": "a", "c": "c"}
    kept: dict[tuple[str, int], Tensor] = {}

    def keeping(name: str, weight: Tensor, bits: int, seen: InputStatistics) -> Tensor:
        x = inputs[source_of[name]].double()
        assert torch.allclose(seen.mean_square.double(), x.square().mean(0), rtol=1e-5)
        kept[name, bits] = stored(name, weight, bits, seen)
        return kept[name, bits]

    statistics = ErrorStatistics(keeping)
    for source, values in inputs.items():
        for part in values.split(17):
            statistics.observe(source, part[None])
    found = statistics.omega(weights, source_of, BITS)
    expected = np.zeros(len(BITS))
    for name, weight in weights.items():
        x = inputs[source_of[name]].double()
        for column, bits in enumerate(BITS[:-1]):
            apart = (kept[name, bits] - weight).double()
            error = (apart.square() * x.square().mean(0)).sum()
            expected[column] += error / (weight.double().square() * x.square().mean(0)).sum()
    assert found == pytest.approx(expected.tolist(), rel=1e-5)
    assert found[0] > found[1] > found[2] > found[3] == 0


def test_weighted_square_goes_through_all_blocks() -> None:
    weight, other = normal(700, 1024), normal(700, 1024, seed=1)  # more than a block of weights
    mean_square = normal(1024, seed=2).square()
    inputs = InputStatistics(mean_square, mean_square)
    expected = ((weight - other).double().square() * mean_square.double()).sum()
    assert weighted_square(weight, other, inputs) == pytest.approx(float(expected), rel=1e-6)


def test_inputs_and_weights_that_are_not_finite_are_refused() -> None:
    statistics = ErrorStatistics(stored)
    statistics.observe("a", torch.full((3, 64), float("inf")))
    with pytest.raises(CheckpointError, match="not finite"):
        statistics.omega({"a": normal(4, 64)}, {"a": "a"}, BITS)
    silent = ErrorStatistics(stored)
    silent.observe("a", torch.zeros(3, 64))
    assert silent.omega({"a": normal(4, 64)}, {"a": "a"}, BITS) == [0.0] * 4
    damaged = ErrorStatistics(lambda name, weight, bits, inputs: weight * float("nan"))
    damaged.observe("a", normal(3, 64))
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        damaged.omega({"a": normal(4, 64)}, {"a": "a"}, BITS)


def test_errors_are_scaled_by_what_layers_cost_alone() -> None:
    errors = np.array([[8.0, 2.0, 0.5, 0.0], [4.0, 1.0, 0.1, 0.0], [0.0, 0.0, 0.0, 0.0]])
    nan = float("nan")
    alone = np.array([[0.4, nan, 0.03, 0.0], [0.8, nan, nan, 0.0], [0.0, nan, nan, 0.0]])
    assert in_nats(errors, alone) == pytest.approx(
        np.array([[0.4, 0.1, 0.03, 0.0], [0.8, 0.2, 0.02, 0.0], [0.0, 0.0, 0.0, 0.0]])
    )
