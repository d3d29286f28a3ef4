"""Vectors in compiled loops compute what tensors do, number for number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quant.numba_lanes import LANES, Columns, Vector, traced
from quant.numba_loops import as_array, compiled_loop, has_numba
from quant.rounding.ways import round_up_to_bfloat16

pytestmark = pytest.mark.skipif(not has_numba(), reason="no numba")


def computed(compute: Any, numbers: Tensor, weights: Tensor, inputs: Tensor, rows: int) -> Tensor:
    """What `compute` gives of columns and vectors, float32 `[rows, LANES]`."""
    function = traced(compute, len(inputs))
    outputs = torch.full((rows, LANES), torch.nan)
    loop = compiled_loop(lambda *of: function(of[0], of[1], of[2], of[3]), parallel=False)
    loop(*map(as_array, (numbers, weights, inputs, outputs)))
    return outputs


def operations(a: Any, b: Any) -> list[Any]:
    """All that vectors can do, exact in either way of computing."""
    return [
        *(a + b, a - b, a * b, a / b, 2 - a, 1 / b, 1 + a, 0.5 * a, -a),
        *(a.abs(), a.round(), a.floor(), a.ceil(), a.bfloat16().float()),
        *(a.clamp(min=-1), a.clamp(max=1), a.clamp(-1, 1), a.maximum(b)),
        *(
            a.where(a > b, b),
            a.where((a < b) & (a > 0), 7.0),
            a.where(a <= 0, b),
            a.where(a.isfinite(), 0.0),
        ),
        round_up_to_bfloat16(a),
        (a.view(torch.int32) & -0x10000).view(torch.float32),
        (a.double() / b.double()).float(),
        (a.double().floor() + 1e-12).float(),
    ]


def test_vectors_compute_what_tensors_do() -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = 3 * torch.randn(2, LANES, generator=draw)
    inputs[0, :6] = torch.tensor([0.5, 1.5, -2.5, torch.nan, torch.inf, -torch.inf])
    inputs[1, 0] = 0.0
    expected = torch.stack([each.float() for each in operations(*inputs)])
    nothing = torch.zeros(1, LANES)
    found = computed(
        lambda _, given: operations(*given), nothing, nothing[0, :1], inputs, len(expected)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_passes_over_columns() -> None:
    draw = torch.Generator().manual_seed(1)
    numbers, weights = torch.randn(37, LANES, generator=draw), torch.rand(37, generator=draw)
    shift = torch.rand(1, LANES, generator=draw)

    def add(number: Vector, weight: Vector, sums: Sequence[Vector]) -> Sequence[Vector]:
        return [sums[0] + weight * number, number.maximum(sums[1])]

    def compute(columns: Columns, given: Sequence[Vector]) -> Sequence[Vector]:
        columns.replace(lambda number: number - given[0])
        return columns.sums(add, (0.0, float("-inf")))

    moved = numbers - shift
    found = computed(compute, numbers, weights, shift, 2)
    assert torch.equal(numbers, moved)
    assert torch.equal(found[1], moved.amax(0))
    assert torch.allclose(found[0].double(), weights.double() @ moved.double(), atol=1e-5)
