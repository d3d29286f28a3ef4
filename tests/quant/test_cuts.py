"""Parts of weights have the codes that the whole weight has there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quant.linear import LayerForm, QuantizedLinear, quantize_linear
from quant.rounding.canonical import CanonicalWeight, dequantize, part_of, quantize, quantize_part
from quant.rounding.importance import InputStatistics
from quant.rounding.ways import Rounding
from quant.scheme import (
    COLUMNS,
    ROUNDINGS,
    ROWS,
    Cut,
    LinearShape,
    Processor,
    ScaleForm,
    part_group,
    part_shape,
)

CPU = torch.device("cpu")
PLAIN_CPU = Processor(instruction_sets=frozenset())
CUTS = (
    Cut(ROWS, 0, 12, 24),
    Cut(ROWS, 7, 24, 24),
    Cut(COLUMNS, 0, 256, 640),
    Cut(COLUMNS, 128, 640, 640),
    Cut(COLUMNS, 192, 448, 640),  # through two groups
    Cut(COLUMNS, 40, 200, 200),  # of one group, the row
)


def weight_of(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))


def statistics(columns: int) -> InputStatistics:
    squares = torch.rand(columns, generator=torch.Generator().manual_seed(1)).square()
    return InputStatistics(squares, squares.sqrt() * 3)


def whole_of(cut: Cut, columns: int = 640, rows: int = 24) -> torch.Tensor:
    return weight_of(rows, cut.size if cut.dimension == COLUMNS else columns)


def assert_is_part(part: CanonicalWeight, whole: CanonicalWeight, cut: Cut) -> None:
    assert torch.equal(part.codes, whole.codes[cut.index])
    assert torch.equal(dequantize(part), dequantize(whole)[cut.index])
    assert part.codes.shape[1] % part.group == 0
    assert part.scale.shape[1] == part.codes.shape[1] // part.group


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_codes_of_a_part_are_those_of_the_whole(bits: int, mode: str, cut: Cut) -> None:
    weight, rounding = whole_of(cut), Rounding(mode, seed=3)
    inputs = statistics(weight.shape[1])
    whole = quantize(weight, bits, rounding=replace(rounding, inputs=inputs))
    part = quantize_part(weight, bits, cut, rounding=replace(rounding, inputs=inputs))
    assert_is_part(part, whole, cut)
    assert_is_part(part_of(whole, cut), whole, cut)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("cut", [Cut(ROWS, 0, 64, 512), Cut(COLUMNS, 384, 512, 640)], ids=str)
def test_a_small_part_is_fitted_as_a_large_whole_is(bits: int, cut: Cut) -> None:
    """Large weights are fitted by a compiled loop, whose sums have another order."""
    weight = whole_of(cut, rows=512).bfloat16()
    assert_is_part(quantize_part(weight, bits, cut), quantize(weight, bits), cut)


def test_the_scale_of_a_row_is_that_of_all_its_columns() -> None:
    weight = weight_of(4, 64)
    weight[:, 63] = 10.0
    part = quantize_part(weight, 8, Cut(COLUMNS, 0, 32, 64))
    assert torch.equal(part.scale, torch.full((4, 1), 10.0 / 127))


@pytest.mark.parametrize(
    ("cut", "group"),
    [
        (Cut(ROWS, 5, 9, 24), 128),
        (Cut(COLUMNS, 128, 384, 640), 128),
        (Cut(COLUMNS, 64, 256, 640), 64),
        (Cut(COLUMNS, 96, 640, 640), 32),
    ],
)
def test_groups_of_a_part(cut: Cut, group: int) -> None:
    assert part_group(128, cut) == group
    shape = part_shape(LinearShape(640, 24, stored_group=128), cut)
    assert shape.group == group


def test_narrow_groups_that_a_cut_takes_apart_are_not_narrow_any_more() -> None:
    """32 columns would share a scale, but of the whole 16 do."""
    shape = part_shape(LinearShape(96, 8), Cut(COLUMNS, 16, 80, 96))
    assert (shape.group, shape.form) == (16, ScaleForm.PAIRS)
    shape = part_shape(LinearShape(96, 8), Cut(COLUMNS, 32, 96, 96))
    assert (shape.group, shape.form) == (32, ScaleForm.NARROW)


@pytest.mark.parametrize("bits", [3, 4, 8, 16])
@pytest.mark.parametrize("processor", [PLAIN_CPU, Processor()], ids=["plain", "avx512"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_parts_are_those_of_the_whole(
    bits: int, processor: Processor, dtype: torch.dtype
) -> None:
    """Parts of rows side by side, and parts of columns summed; with the kernels that plans name."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        processor = PLAIN_CPU
    form = LayerForm(bits, processor, dtype, CPU)
    weight, x = weight_of(128, 512), weight_of(3, 512).to(dtype)
    inputs = statistics(512)
    whole = quantize_linear(weight, None, form, "a", inputs)(x).double()

    def part(cut: Cut) -> torch.Tensor:
        linear = quantize_linear(weight, None, form, "a", inputs, cut)
        own = x if cut.dimension == ROWS else x[:, cut.begin : cut.end]
        assert isinstance(linear, QuantizedLinear) or bits == 16
        return linear(own).double()

    beside = torch.cat([part(Cut(ROWS, 0, 64, 128)), part(Cut(ROWS, 64, 128, 128))], -1)
    summed = part(Cut(COLUMNS, 0, 384, 512)) + part(Cut(COLUMNS, 384, 512, 512))
    rounds_again = bits == 8 and processor != PLAIN_CPU
    tolerance = 0.02 if rounds_again else 0.006 if dtype == torch.bfloat16 else 1e-6
    for found in (beside, summed):
        assert float((found - whole).norm() / whole.norm()) < tolerance


def test_a_part_in_groups_of_its_own_keeps_its_columns_in_order() -> None:
    whole = quantize(weight_of(8, 640), 4)
    cut = Cut(COLUMNS, 96, 544, 640)
    part = part_of(replace(whole), cut)
    assert part.group == 32
    assert_is_part(part, whole, cut)
