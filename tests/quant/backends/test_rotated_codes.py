"""8 bit with rounded activations where some are large, against products in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quant.backends.cpu.int8pack import OneDnnW8A8
from quant.loading.emulated_kernels import represented_product
from quant.rounding import rotation
from quant.rounding.canonical import dequantize, quantize
from quant.rounding.importance import InputStatistics
from quant.rounding.rotation import RotatedCodes, rotate
from quant.rounding.ways import Rounding

CPU = torch.device("cpu")
WIDTHS = (64, 576, 1024)


def case(width: int, large: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight `[96, in]` and inputs `[70, in]`, of which one feature is `large` times the others
    while its column is as much smaller.
    """
    generator = torch.Generator().manual_seed(width)
    weight = 0.02 * torch.randn(96, width, generator=generator)
    x = torch.randn(70, width, generator=generator)
    x[:, width // 3] *= large
    weight[:, width // 3] /= large
    return weight, x


def statistics_of(x: torch.Tensor) -> InputStatistics:
    return InputStatistics(x.square().mean(0), x.abs().amax(0))


def error(out: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> float:
    wanted = x.double() @ weight.double().t()
    return float((out.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("width", WIDTHS)
def test_large_features_cost_no_more_than_rounding_weights(width: int) -> None:
    weight, x = case(width, 50.0)
    weights_alone = error(x.double() @ dequantize(quantize(weight, 8)).double().t(), weight, x)
    with_statistics = RotatedCodes.of_weight(weight, Rounding(inputs=statistics_of(x)))
    assert error(with_statistics.forward(x), weight, x) <= 1.5 * weights_alone
    one_scale = x / (scale := x.abs().amax(-1, keepdim=True) / 127)
    plain = one_scale.round() * scale @ dequantize(quantize(weight, 8)).t()
    without = RotatedCodes.of_weight(weight).forward(x)
    assert error(without, weight, x) <= error(plain, weight, x) / 2.5


@pytest.mark.parametrize("width", WIDTHS)
def test_large_tokens_and_single_large_activations(width: int) -> None:
    """As the inputs of the last linear of an MLP are, in a few tokens."""
    weight, x = case(width, 1.0)
    x[3] *= 1000
    x[5, 1] = 40.0
    packed = RotatedCodes.of_weight(weight)
    for token in (3, 5, 6):
        row = x[token : token + 1]
        assert error(packed.forward(row), weight, row) <= 0.02


@pytest.mark.parametrize("with_statistics", [False, True])
def test_restored_weight_is_that_of_plain_inputs(with_statistics: bool) -> None:
    weight, x = case(576, 50.0)
    packed = RotatedCodes.of_weight(
        weight, Rounding(inputs=statistics_of(x) if with_statistics else None)
    )
    assert error(x.double() @ packed.restored().double().t(), weight, x) < 0.02
    product = error(packed.forward(x), packed.restored(), x)
    assert 1e-3 < product < 0.04  # activations are rounded in the one alone


def test_features_without_statistics_to_go_by() -> None:
    """Such as never were different from zero, or have no weight."""
    weight, x = case(576, 1.0)
    x[:, 5] = 0
    weight[:, 6] = 0
    packed = RotatedCodes.of_weight(weight, Rounding(inputs=statistics_of(x)))
    assert error(packed.forward(x), weight, x) < 0.02
    nothing = RotatedCodes.of_weight(weight, Rounding(inputs=statistics_of(torch.zeros_like(x))))
    assert error(nothing.forward(x), weight, x) < 0.02


def test_codes_of_a_checkpoint_are_rotated_too() -> None:
    weight, x = case(1024, 50.0)
    packed = RotatedCodes.of_canonical(quantize(weight, 8))
    assert error(packed.forward(x), weight, x) < 0.03


def test_weights_are_read_and_never_changed() -> None:
    weight, x = case(1024, 50.0)
    before = weight.clone()
    RotatedCodes.of_weight(weight, Rounding(inputs=statistics_of(x)))
    assert torch.equal(weight, before)


def test_compiled_rotation_of_weights_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    rows = torch.randn(20, 576, generator=torch.Generator().manual_seed(0))
    plain = rotate(rows)
    monkeypatch.setattr(rotation, "_LEAST_NUMBERS", 0)
    assert torch.equal(rotate(rows), plain)
    assert torch.allclose(rotate(plain) / 64, rows, atol=1e-5)


def test_kernel_and_stand_in_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With exact sums in the place of oneDNN's, which saturate on a CPU without VNNI."""

    def product(codes: torch.Tensor, *others: Any) -> torch.Tensor:
        x_scale, x_zero, packed, scale, zero = others[:5]
        assert int(zero) == 0
        sums = (codes.double() - x_zero) @ packed.double().t()
        return (x_scale * sums * scale).float()

    monkeypatch.setattr(torch.ops.onednn, "qlinear_prepack", lambda codes, _: codes)
    monkeypatch.setattr(torch.ops.onednn, "qlinear_pointwise", product)
    weight, x = case(576, 50.0)
    inputs = statistics_of(x)
    for kernel, stand_in in (
        (
            OneDnnW8A8.from_weight(weight, torch.float32, CPU, Rounding(inputs=inputs)),
            RotatedCodes.of_weight(weight, Rounding(inputs=inputs)),
        ),
        (
            OneDnnW8A8.from_canonical(quantize(weight, 8)),
            RotatedCodes.of_canonical(quantize(weight, 8)),
        ),
    ):
        assert torch.allclose(kernel.forward(x), stand_in.forward(x), rtol=1e-4, atol=1e-5)
    represented = OneDnnW8A8.represent(weight, Rounding(inputs=inputs))
    assert torch.equal(
        represented, RotatedCodes.of_weight(weight, Rounding(inputs=inputs)).restored()
    )


def test_onednn_is_represented_with_rounded_activations() -> None:
    weight, x = case(576, 50.0)
    product = represented_product("onednn_w8a8", weight, torch.float32)
    assert torch.equal(product(x), RotatedCodes.of_weight(weight).forward(x))
    assert product(x.view(7, 10, 576)).shape == (7, 10, 96)
