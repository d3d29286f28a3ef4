"""Activations as 8-bit codes: the compiled loop against PyTorch's own operations."""

from __future__ import annotations

import pytest
import torch

from quant.backends.cpu.activation_codes import LIMIT, MIDDLE, round_activations

pytest.importorskip("numba")


def by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as whole numbers and scales, in float32 as the loop computes."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / LIMIT
    return (x.float() / scale + MIDDLE + 0.5).floor(), scale


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 33, 300])
def test_codes_and_scales_are_those_of_separate_operations(tokens: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    x = torch.randn(tokens, 2**14, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0] = 0
    codes, scale = round_activations(x)
    torch.set_num_threads(before)
    expected_codes, expected_scale = by_torch(x)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes.float(), expected_codes)


def test_rows_of_a_larger_tensor() -> None:
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()[:, ::2]
    codes, scale = round_activations(x)
    expected_codes, expected_scale = by_torch(x)
    assert torch.equal(codes.float(), expected_codes)
    assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_show_in_the_scale(bad: float) -> None:
    x = torch.ones(32, 1024, dtype=torch.bfloat16)
    x[7, 3] = bad
    _, scale = round_activations(x)
    assert not scale[7].isfinite()
    assert torch.equal(scale[8], torch.ones(1) / LIMIT)
