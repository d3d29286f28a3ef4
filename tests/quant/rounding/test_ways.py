from __future__ import annotations

import math

import pytest
import torch

from quant.common.errors import SpecError
from quant.devices import row_blocks
from quant.linear import LayerForm, quantize_linear
from quant.rounding.canonical import dequantize, quantize
from quant.rounding.ways import Rounding
from quant.scheme import AFFINE_BITS, Processor

CPU = torch.device("cpu")
STOCHASTIC = Rounding.of_tensor("stochastic", "model.layers.0.mlp.up_proj")
NEAREST, WEIGHTED = Rounding("nearest"), Rounding("weighted")


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def step_of(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The scale at every weight; it does not depend on how codes are rounded."""
    canonical = quantize(weight, bits, rounding=NEAREST)
    return canonical.scale.double().repeat_interleave(canonical.group, dim=1)


@pytest.mark.parametrize("bits", [*AFFINE_BITS, 8])
def test_stochastic_mean_and_variance_are_those_of_the_closed_form(bits: int) -> None:
    """Up with probability f, the fraction: the mean is the weight, the variance s^2 f (1 - f).

    The mean of n draws is held to 5 of its standard deviations (one in 2 million beyond), the sum
    of all squared errors to 5 of its own, by the fourth moment of a Bernoulli variable.
    """
    weight, draws = weights(6, 128), 400
    rounds = torch.stack(
        [
            dequantize(quantize(weight, bits, rounding=Rounding("stochastic", n)))
            for n in range(draws)
        ]
    ).double()
    step, canonical = step_of(weight, bits), quantize(weight, bits, rounding=NEAREST)
    zero = 0 if canonical.zero is None else canonical.zero.double().repeat_interleave(32, dim=1)
    position = (weight.double() - zero) / step
    fraction = position - position.floor()
    variance = step**2 * fraction * (1 - fraction)
    error = rounds - weight.double()
    assert (error.mean(0).abs() <= 5 * (variance / draws).sqrt() + 1e-6 * step).all()
    fourth = step**4 * fraction * (1 - fraction) * (1 - 3 * fraction * (1 - fraction))
    spread = math.sqrt(float((fourth - variance**2).sum()) * draws)
    assert abs(float((error**2).sum()) - draws * float(variance.sum())) <= 5 * spread
    assert (error.abs() < step * (1 + 1e-5)).all()
    assert (error.abs() > step / 2 * (1 + 1e-5)).any(), "nearest would never be so far off"


@pytest.mark.parametrize("bits", [*AFFINE_BITS, 8])
def test_draws_are_the_tensors_own(bits: int) -> None:
    weight = weights(8, 256)
    codes = quantize(weight, bits, rounding=STOCHASTIC).codes
    again = Rounding.of_tensor("stochastic", "model.layers.0.mlp.up_proj")
    other = Rounding.of_tensor("stochastic", "model.layers.1.mlp.up_proj")
    assert torch.equal(quantize(weight, bits, rounding=again).codes, codes)
    assert not torch.equal(quantize(weight, bits, rounding=other).codes, codes)


def test_stochastic_codes_do_not_depend_on_the_size_of_blocks() -> None:
    """Other devices work in other blocks: the draws go by the order of elements alone."""
    weight = weights(700, 1024)
    assert len(list(row_blocks(700, 1024, weight.device))) > 1
    whole = quantize(weight, 4, rounding=STOCHASTIC)
    generator = STOCHASTIC.generator()
    uniform = torch.rand(700, 1024, generator=generator)
    assert whole.zero is not None
    grouped = weight.view(700, 32, 32) - whole.zero.float().unsqueeze(-1)
    position = (grouped / whole.scale.float().unsqueeze(-1)).view(700, 1024)
    expected = position.floor() + (uniform < position - position.floor()) + 8
    assert torch.equal(whole.codes.float(), expected.clamp(0, 15))


@pytest.mark.parametrize("rounding", [STOCHASTIC, NEAREST, WEIGHTED])
@pytest.mark.parametrize("bits", [*AFFINE_BITS, 8])
@pytest.mark.parametrize("value", [0.0, 0.75, -3.0])
def test_equal_weights_survive(bits: int, value: float, rounding: Rounding) -> None:
    weight = torch.full((3, 128), value)
    restored = dequantize(quantize(weight, bits, rounding=rounding))
    # steps by which narrow ranges reach further, or drawn
    further = {5: 0.5, 6: 1.0}.get(bits, 0.25)
    steps = 1 if rounding is STOCHASTIC else further
    limit = 1e-6 if bits == 8 else steps / (2**bits - 1 - further)
    torch.testing.assert_close(restored, weight, rtol=limit, atol=0)


def test_linears_take_the_rounding() -> None:
    weight = weights(32, 128)
    processor = Processor(instruction_sets=frozenset())
    form = LayerForm(4, processor, torch.float32, CPU, rounding="stochastic")
    linear = quantize_linear(weight, None, form, "layers.0.q_proj.weight")
    rounding = Rounding.of_tensor("stochastic", "layers.0.q_proj.weight")
    meant = dequantize(quantize(weight, 4, rounding=rounding))
    torch.testing.assert_close(linear(torch.eye(128)), meant.t(), rtol=1e-6, atol=1e-6)


def test_unknown_mode() -> None:
    with pytest.raises(SpecError, match="'up' is not one of weighted, nearest, stochastic"):
        Rounding("up")
