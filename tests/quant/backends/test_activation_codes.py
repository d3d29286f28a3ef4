"""Activations as 8-bit codes: the compiled loop against PyTorch's own operations, in float64."""

from __future__ import annotations

import pytest
import torch
from scipy.linalg import hadamard

from quant.rounding import rotation as activation_codes
from quant.rounding.rotation import LANES, LIMIT, MIDDLE, round_activations

pytest.importorskip("numba")


def rotated(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Inputs times their factors, mixed by scipy's Hadamard matrix in float64."""
    matrix = torch.tensor(hadamard(LANES), dtype=torch.float64)
    lanes = (x.double() * factor).view(len(x), LANES, -1)
    return torch.einsum("kl,tlc->tkc", matrix, lanes).reshape(x.shape)


def factors(width: int) -> torch.Tensor:
    return torch.rand(width, generator=torch.Generator().manual_seed(2)) + 0.1


@pytest.mark.parametrize(
    ("dtype", "threads"), [(torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float32, 1)]
)
@pytest.mark.parametrize("tokens", [1, 33, 300])
def test_codes_and_scales_against_a_hadamard_matrix(
    tokens: int, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the compiled loop gives the same bits as separate operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    width = 64 * 171
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[-1] = 0
    factor = factors(width)
    monkeypatch.setattr(activation_codes, "_LEAST_NUMBERS", 0)
    codes, scale = round_activations(x, factor)
    monkeypatch.setattr(activation_codes, "_LEAST_NUMBERS", x.numel() + 1)
    plain_codes, plain_scale = round_activations(x, factor)
    torch.set_num_threads(before)
    assert torch.equal(codes, plain_codes)
    assert torch.equal(scale, plain_scale)
    wanted = rotated(x, factor)
    largest = wanted.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert torch.allclose(scale.double(), largest / LIMIT, rtol=1e-5, atol=0)
    assert ((codes.double() - MIDDLE) * scale - wanted).abs().le(scale * 0.501).all()
    assert torch.equal(codes[-1], torch.full((width,), MIDDLE, dtype=torch.uint8))


def test_rows_of_a_larger_tensor() -> None:
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()[:, ::2]
    codes, scale = round_activations(x, factors(512))
    expected_codes, expected_scale = round_activations(x.contiguous(), factors(512))
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scale, expected_scale)


def test_a_token_does_not_depend_on_how_many_there_are() -> None:
    """One token alone is not worth compiling for, and is computed by separate operations."""
    x = torch.randn(200, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes, scale = round_activations(x, factors(576))
    for token in (0, 7, 199):
        alone, own = round_activations(x[token : token + 1], factors(576))
        assert torch.equal(alone[0], codes[token])
        assert torch.equal(own[0], scale[token])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_show_in_the_scale(bad: float) -> None:
    x = torch.ones(32, 1024, dtype=torch.bfloat16)
    x[7, 3] = bad
    _, scale = round_activations(x, torch.ones(1024))
    assert not scale[7].isfinite()
    assert torch.equal(scale[8], torch.full((1,), 64.0) / LIMIT)
