"""Scales and zeros in a byte each, held against what their header says."""

from __future__ import annotations

import pytest
import torch

from quant.narrow import decode_scales, encode
from quant.rounding.canonical import quantize
from quant.rounding.ways import Rounding
from quant.scheme import AFFINE_BITS, ROUNDINGS


def restored(held: torch.Tensor, steps: int) -> tuple[list[list[float]], list[list[float]]]:
    """Scales and zeros by Python's own numbers."""
    scales, zeros = [], []
    for (exponent, unused), *groups in held.tolist():
        assert unused == 0
        scales.append([s * 2.0 ** (exponent - 127) for s, _ in groups])
        exact = [
            (z - 128) / steps * scale for (_, z), scale in zip(groups, scales[-1], strict=True)
        ]
        zeros.append([cut_to_8_bits(value) for value in exact])
    return scales, zeros


def cut_to_8_bits(value: float) -> float:
    """The first eight significant binary digits, of which bfloat16 has so many."""
    if value == 0:
        return 0.0
    mantissa, exponent = torch.frexp(torch.tensor(value, dtype=torch.float64))
    return float(torch.ldexp((mantissa * 256).trunc(), exponent - 8))


@pytest.mark.parametrize("exponent", [1, 100, 127, 200])
@pytest.mark.parametrize(("bits", "steps"), [(3, 16), (4, 16), (5, 8), (6, 4)])
def test_every_pair_of_bytes(exponent: int, bits: int, steps: int) -> None:
    held = torch.zeros(255, 257, 2, dtype=torch.uint8)
    held[:, 0, 0] = exponent
    held[:, 1:, 0] = torch.arange(1, 256)[:, None]
    held[:, 1:, 1] = torch.arange(256)
    scale, zero = decode_scales(held, bits)
    scales, zeros = restored(held, steps)
    assert scale.double().tolist() == scales
    if exponent > 20:  # no zero is below the least normal number
        assert zero.double().tolist() == zeros
    again = decode_scales(encode(scale.bfloat16(), zero.bfloat16(), bits), bits)
    assert torch.equal(again[0], scale)
    assert torch.equal(again[1], zero)


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("size", [1e-30, 0.02, 1e25])
def test_what_weights_are_rounded_to_can_be_held(bits: int, mode: str, size: float) -> None:
    generator = torch.Generator().manual_seed(bits)
    weight = size * torch.randn(40, 256, generator=generator)
    weight *= torch.logspace(-3, 0, 256)
    weight[3], weight[5, :64], weight[7] = 0.0, 0.0, size
    canonical = quantize(weight, bits, rounding=Rounding(mode))
    assert canonical.narrow
    assert canonical.zero is not None
    held = encode(canonical.scale, canonical.zero, bits)
    scale, zero = decode_scales(held, bits)
    assert torch.equal(scale, canonical.scale.float())
    assert torch.equal(zero, canonical.zero.float())
