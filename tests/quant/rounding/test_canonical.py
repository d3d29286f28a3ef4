from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from quant.common.errors import CheckpointError, SpecError
from quant.devices import row_blocks
from quant.rounding.canonical import dequantize, pack_codes, quantize, unpack_codes
from quant.rounding.ways import Rounding
from quant.scheme import AFFINE_BITS, ROUNDINGS

NEAREST = Rounding("nearest")
COLUMNS = (1, 7, 32, 64, 96, 100, 128, 200, 256, 640)


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def largest_excess(weight: torch.Tensor, bits: int) -> float:
    """How far a weight is beyond half a scale from its code, relative to its row's largest."""
    canonical = quantize(weight, bits, rounding=NEAREST)
    scale = canonical.scale.double().repeat_interleave(canonical.group, dim=1)
    error = (weight.double() - dequantize(canonical).double()).abs()
    span = weight.double().abs().amax(dim=1, keepdim=True).clamp_min(1e-300)
    return float(((error - scale / 2) / span).max())


def further(bits: int) -> float:
    """Share of its range by which a group's codes reach further."""
    more = {3: 0.25, 4: 0.25, 5: 0.5, 6: 1.0}[bits]
    return more / (2**bits - 1 - more)


@pytest.mark.parametrize("bits", [*AFFINE_BITS, 8])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e15])
def test_error_is_at_most_half_a_scale(bits: int, scale: float) -> None:
    for columns in COLUMNS:
        assert largest_excess(weights(17, columns) * scale, bits) < 1e-6, columns


@pytest.mark.parametrize("bits", [*AFFINE_BITS, 8])
def test_offset_far_beyond_the_range_is_covered(bits: int) -> None:
    """A bfloat16 zero of 1.003 is off by far more than the group's range of 0.001."""
    weight = 1.003 + 1e-3 * torch.rand(9, 256, generator=torch.Generator().manual_seed(1))
    assert largest_excess(weight, bits) < 1e-6


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_scale_is_near_the_least_possible(bits: int) -> None:
    """The range over the number of steps is the best scale. What a byte adds is up to a 64th, for
    groups half as wide as the widest, and codes reach a quarter of a step further, half of one and
    a whole one at 5 and 6 bit.
    """
    weight = weights(64, 256)
    groups = weight.view(64, 8, 32)
    best = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    ratio = quantize(weight, bits, rounding=NEAREST).scale.float() / best
    assert ratio.min() >= 1.0
    assert ratio.max() < (1 + 1 / 32) * (1 + further(bits))


def test_eight_bit_codes_match_numpy() -> None:
    weight = weights(13, 77)
    canonical = quantize(weight.half(), 8)
    exact = weight.half().numpy().astype(np.float32)
    scale = np.abs(exact).max(axis=1, keepdims=True) / np.float32(127)
    np.testing.assert_array_equal(canonical.scale.numpy(), scale)
    np.testing.assert_array_equal(canonical.codes.numpy(), np.rint(exact / scale))


@pytest.mark.parametrize("bits", [*AFFINE_BITS, 8])
def test_equal_weights_survive(bits: int) -> None:
    """With narrow scales off by the part of a step by which codes reach further, at most."""
    weight = torch.tensor([[0.0], [0.75], [-3.0]]).expand(3, 128)
    limit = 1e-6 if bits == 8 else further(bits)
    torch.testing.assert_close(dequantize(quantize(weight, bits)), weight, rtol=limit, atol=0)


@pytest.mark.parametrize("bits", [*AFFINE_BITS, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_blocks_of_rows_do_not_show(bits: int, dtype: torch.dtype) -> None:
    """A weight of several blocks has the codes that its rows have alone."""
    weight = weights(700, 1024).to(dtype)
    assert len(list(row_blocks(700, 1024, weight.device))) > 1
    whole = quantize(weight, bits, rounding=NEAREST)
    for row in (0, 511, 512, 699):
        alone = quantize(weight[row : row + 1], bits, rounding=NEAREST)
        assert torch.equal(whole.codes[row], alone.codes[0])
        assert torch.equal(whole.scale[row], alone.scale[0])


def test_source_is_left_alone() -> None:
    weight = weights(4, 64)
    before = weight.clone()
    quantize(weight, 4)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("bits", [*AFFINE_BITS, 8])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_values_that_are_not_finite(bits: int, value: str, rounding: str) -> None:
    weight = weights(4, 256)
    weight[2, 130] = float(value)
    with pytest.raises(CheckpointError, match=r"1 of \d+ weight groups hold NaN"):
        quantize(weight, bits, rounding=Rounding(rounding))


@pytest.mark.parametrize("bits", [*AFFINE_BITS, 8])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("pattern", [-1, 0x7FFFFFFF, 0x7F800001, -0x800000])
def test_every_kind_of_nan_is_seen(bits: int, pattern: int, rounding: str) -> None:
    """Vector units make NaNs of all ones, which integer arithmetic turns into small numbers."""
    weight = weights(4, 256)
    weight.view(torch.int32)[1] = pattern
    with pytest.raises(CheckpointError, match="hold NaN"):
        quantize(weight, bits, rounding=Rounding(rounding))


def test_refused_inputs() -> None:
    with pytest.raises(SpecError, match="cannot quantize to 7 bits"):
        quantize(weights(2, 2), 7)
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize(torch.zeros(4, 4, dtype=torch.int8), 4)


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_packing_round_trip_of_every_width(bits: int) -> None:
    for columns in (*range(1, 20), 64, 72, 128, 192, 1024):
        generator = torch.Generator().manual_seed(columns)
        codes = torch.randint(0, 2**bits, (5, columns), generator=generator, dtype=torch.uint8)
        packed = pack_codes(codes, bits)
        planes = -(-columns // 8)
        wanted = {3: 3 * planes, 4: 0, 5: planes, 6: 2 * planes}[bits]
        assert packed.nbytes == 5 * (wanted + (-(-columns // 2) if bits > 3 else 0))
        assert torch.equal(unpack_codes(packed, columns, bits), codes)
        given = torch.empty_like(codes)
        found = unpack_codes(packed, columns, bits, given)
        assert torch.equal(found, codes)


def test_every_pair_of_nibbles() -> None:
    pairs = torch.tensor(list(itertools.product(range(16), repeat=2)), dtype=torch.uint8)
    packed = pack_codes(pairs, 4)
    assert torch.equal(packed[:, 0].long(), pairs[:, 0].long() + 16 * pairs[:, 1].long())
    assert torch.equal(unpack_codes(packed, 2, 4), pairs)


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_every_code_at_every_bit_position(bits: int) -> None:
    """Of 16 columns eight bytes have the nibbles, then two each of a bit."""
    for code, position in itertools.product(range(1 << bits), range(16)):
        codes = torch.zeros(1, 16, dtype=torch.uint8)
        codes[0, position] = code
        held = pack_codes(codes, bits)[0].tolist()
        upper = code
        if bits > 3:
            assert held[position % 8] >> 4 * (position // 8) == code & 15
            held, upper = held[8:], code >> 4
        found = [byte >> (position // 2) for byte in held[position % 2 :: 2]]
        assert found == [(upper >> plane) & 1 for plane in range(len(held) // 2)]
        assert sum(map(bool, held)) == upper.bit_count()
