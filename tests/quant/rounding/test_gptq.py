from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from quant.checkpoint.codes import GroupCodes
from quant.common.errors import CheckpointError, SpecError
from quant.narrow import decode_scales, encode
from quant.rounding.gptq import gptq
from quant.scheme import GptqOptions

Matrix = npt.NDArray[np.float64]

DEFAULT = GptqOptions()
WAYS = [
    GptqOptions(),
    GptqOptions(symmetric=True),
    GptqOptions(act_order=False),
    GptqOptions(symmetric=True, act_order=False),
    GptqOptions(narrow=True),
]


def problem(
    rows: int = 24, columns: int = 96, tokens: int = 400, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight `[rows, columns]` and correlated inputs `[tokens, columns]` of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.1
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    inputs = torch.randn(tokens, columns, generator=generator) @ (mix + 0.3 * torch.eye(columns))
    return weight, inputs * (0.2 + torch.rand(columns, generator=generator))


def output_error(weight: torch.Tensor, rounded: torch.Tensor, inputs: torch.Tensor) -> float:
    return float(((rounded.double() - weight.double()) @ inputs.double().t()).square().sum())


def zeros_of(found: GroupCodes) -> torch.Tensor:
    """What stands for the weight 0, in steps of codes, float64 `[out, groups]`."""
    zero = found.zero.double()
    return zero if found.low is None else zero - found.low.double() / found.scale.double()


def plain_gptq(
    weight: torch.Tensor, inputs: torch.Tensor, found: GroupCodes, options: GptqOptions
) -> Matrix:
    """Codes in float64, one column after the other: a column leaves the inverse by elimination.

    Optimal brain quantization of all rows in one order, which GPTQ's Cholesky factor is a faster
    way to. Scales and zeros are those of `found`: how they are chosen is no part of it.
    """
    exact = inputs.double().numpy()
    gram = exact.T @ exact
    diagonal = gram.diagonal().copy()
    order = np.argsort(-diagonal, kind="stable") if options.act_order else np.arange(len(gram))
    inverse = np.linalg.inv(gram + options.damping * diagonal.mean() * np.eye(len(gram)))
    values, codes = weight.double().numpy().copy(), np.zeros(weight.shape)
    for place, column in enumerate(order):
        group = int(found.group_of_column[column])
        scale = found.scale[:, group].double().numpy()
        zero = zeros_of(found)[:, group].numpy()
        code = np.clip(np.rint(values[:, column] / scale + zero), 0, 2**found.bits - 1)
        codes[:, column] = code
        error = (values[:, column] - (code - zero) * scale) / inverse[column, column]
        rest = order[place + 1 :]
        values[:, rest] -= np.outer(error, inverse[column, rest])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return codes


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize(("bits", "columns"), [(3, 256), (4, 96), (4, 100), (8, 256)])
def test_codes_are_those_of_the_plain_algorithm(
    bits: int, options: GptqOptions, columns: int
) -> None:
    """256 columns are two blocks; of 100 a row is one group. In float32 a tie may fall elsewhere,
    and with it what follows in that row.
    """
    weight, inputs = problem(columns=columns, tokens=4 * columns)
    found = gptq(weight, inputs.t() @ inputs, bits, options)
    expected = plain_gptq(weight, inputs, found, options)
    same_rows = (found.codes.numpy() == expected).all(axis=1)
    assert same_rows.mean() >= 0.85
    columns_of = found.group_of_column.long()
    plain = torch.from_numpy(expected) - zeros_of(found)[:, columns_of]
    plain *= found.scale.double()[:, columns_of]
    ratio = output_error(weight, found.dequantize(), inputs) / output_error(weight, plain, inputs)
    assert abs(ratio - 1) < 0.01


def rounded_alone(weight: torch.Tensor, found: GroupCodes) -> torch.Tensor:
    """Every weight to its nearest code on the same scales."""
    columns = found.group_of_column.long()
    scale, zero = found.scale.float()[:, columns], zeros_of(found).float()[:, columns]
    codes = (weight / scale + zero).round().clamp(0, 2**found.bits - 1)
    return (codes - zero) * scale


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("options", WAYS)
def test_outputs_change_less_than_by_rounding(bits: int, options: GptqOptions) -> None:
    weight, inputs = problem(rows=64, columns=256, tokens=1024, seed=1)
    found = gptq(weight, inputs.t() @ inputs, bits, options)
    alone = output_error(weight, rounded_alone(weight, found), inputs)
    assert output_error(weight, found.dequantize(), inputs) < 0.6 * alone


@pytest.mark.parametrize("options", WAYS[:-1])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_scale_and_product_with_zero_are_exact_in_16_bits(bits: int, options: GptqOptions) -> None:
    weight, inputs = problem()
    found = gptq(weight * torch.logspace(-4, 3, 24)[:, None], inputs.t() @ inputs, bits, options)
    scale = found.scale.float()
    normal = scale >= torch.finfo(torch.float16).tiny
    assert torch.equal(scale[normal].bfloat16().float(), scale[normal])
    if bits < 8:
        product = ((1 << (bits - 1)) - found.zero.float()) * scale
        assert torch.equal(product.half().float(), product)
    if options.symmetric:
        assert (found.zero == 1 << (bits - 1)).all()


@pytest.mark.parametrize("bits", [3, 4])
def test_a_zero_between_codes_of_32_columns_loses_less(bits: int) -> None:
    """Than one that is a code of 128, and that in no more bytes than weights have that are rounded
    when they are loaded: scale and zero can be told from one byte each.
    """
    weight, inputs = problem(rows=64, columns=256, tokens=1024, seed=1)
    own, usual = (
        gptq(weight, inputs.t() @ inputs, bits, GptqOptions(narrow=narrow))
        for narrow in (True, False)
    )
    errors = [output_error(weight, each.dequantize(), inputs) for each in (own, usual)]
    assert errors[0] < 0.8 * errors[1]
    assert own.low is not None
    scale, low = decode_scales(encode(own.scale, own.low, bits), bits)
    assert torch.equal(scale, own.scale.float())
    assert torch.equal(low, own.low)
    whole_row = gptq(weight[:, :100], torch.eye(100), bits, GptqOptions(narrow=True))
    assert not whole_row.narrow, "32 does not divide it"


def test_inputs_that_are_always_zero_leave_the_others_as_they_are() -> None:
    weight, inputs = problem(columns=128)
    inputs[:, 5], inputs[:, 77] = 0, 0
    found = gptq(weight, inputs.t() @ inputs, 4, DEFAULT)
    alone = rounded_alone(weight, found)
    restored = found.dequantize()
    assert torch.equal(restored[:, 5], alone[:, 5])
    assert torch.equal(restored[:, 77], alone[:, 77])
    assert output_error(weight, restored, inputs) < output_error(weight, alone, inputs)


@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_fewer_tokens_than_inputs(tokens: int) -> None:
    """X^T X is singular then; the damping carries it, and without inputs each weight is alone."""
    weight, inputs = problem(columns=128, tokens=tokens)
    found = gptq(weight, inputs.t() @ inputs, 4, DEFAULT)
    assert bool(torch.isfinite(found.dequantize()).all())
    alone = output_error(weight, rounded_alone(weight, found), inputs)
    assert output_error(weight, found.dequantize(), inputs) <= alone


def test_equal_and_zero_weights() -> None:
    _, inputs = problem(columns=128)
    for value in (0.0, 0.75, -3.0):
        weight = torch.full((8, 128), value)
        restored = gptq(weight, inputs.t() @ inputs, 3, DEFAULT).dequantize()
        assert (restored - weight).abs().max() <= 0.05 * abs(value)


def test_inputs_stay_as_they_are() -> None:
    weight, inputs = problem()
    gram = inputs.t() @ inputs
    kept = weight.clone(), gram.clone()
    gptq(weight, gram, 4, GptqOptions(act_order=False))
    gptq(weight, gram, 4, DEFAULT)
    assert torch.equal(weight, kept[0])
    assert torch.equal(gram, kept[1])


@pytest.mark.parametrize("options", WAYS)
def test_values_that_cannot_be_used(options: GptqOptions) -> None:
    weight, inputs = problem()
    gram = inputs.t() @ inputs
    unusable = [(torch.nan, "NaN"), (-torch.inf, "NaN"), (1e7, "too large")]
    for value, message in unusable[:2] if options.narrow else unusable:
        damaged = weight.clone()
        damaged[3, 70] = value
        with pytest.raises(CheckpointError, match=message):
            gptq(damaged, gram, 4, options)
    gram[2, 2] = torch.nan
    with pytest.raises(SpecError, match="calibration inputs are not finite"):
        gptq(weight, gram, 4, options)


def test_a_matrix_that_no_damping_saves() -> None:
    weight, _ = problem(columns=32)
    with pytest.raises(SpecError, match="cannot be inverted even with 100% damping"):
        gptq(weight, torch.full((32, 32), -1e6).fill_diagonal_(1.0), 4, DEFAULT)


def test_options_that_cannot_be_used() -> None:
    weight, inputs = problem()
    with pytest.raises(SpecError, match="cannot quantize to 7 bits"):
        gptq(weight, inputs.t() @ inputs, 7, DEFAULT)
    for damping in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(SpecError, match="damping is"):
            GptqOptions(damping=damping)
