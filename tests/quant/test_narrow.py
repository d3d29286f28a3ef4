"""Scales and zeros in a byte each, held against what their header says."""

from __future__ import annotations

import pytest
import torch

from quant.narrow import decode_scales, encode
from quant.rounding.canonical import quantize
from quant.rounding.ways import Rounding
from quant.scheme import AFFINE_BITS, ROUNDINGS


def restored(held: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros in float64; of zeros the first eight significant binary digits, of which
    bfloat16 has so many.
    """
    assert not held[:, 0, 1].any()
    exponent, scale, zero = held[:, :1, 0].int(), held[:, 1:, 0].double(), held[:, 1:, 1].double()
    scale = scale * 2.0 ** (exponent - 127).double()
    mantissa, exponent = torch.frexp((zero - 128) / steps * scale)
    return scale, (mantissa * 256).trunc() * 2.0 ** (exponent - 8).double()


@pytest.mark.parametrize("exponent", [1, 100, 127, 200])
@pytest.mark.parametrize(("bits", "steps"), [(3, 16), (4, 16), (5, 8), (6, 4)])
def test_every_pair_of_bytes(exponent: int, bits: int, steps: int) -> None:
    held = torch.zeros(255, 257, 2, dtype=torch.uint8)
    held[:, 0, 0] = exponent
    held[:, 1:, 0] = torch.arange(1, 256)[:, None]
    held[:, 1:, 1] = torch.arange(256)
    scale, zero = decode_scales(held, bits)
    scales, zeros = restored(held, steps)
    assert torch.equal(scale.double(), scales)
    if exponent > 20:  # no zero is below the least normal number
        assert torch.equal(zero.double(), zeros)
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
