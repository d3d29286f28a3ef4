"""Prepacked 16-bit linears against float64, and when a linear stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quant.backends import widened
from quant.devices import local_processor
from quant.linear import PrepackedLinear, prepack, prepack_linears
from quant.loading.loader import module_nbytes
from quant.scheme import Processor

HERE = local_processor(torch.device("cpu"))
needs_bf16 = pytest.mark.skipif(
    "avx512_bf16" not in HERE.instruction_sets, reason="needs a CPU with AVX-512 BF16"
)


def linear(columns: int, rows: int, bias: bool, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(columns, rows, bias=bias, dtype=dtype).requires_grad_(False)


@needs_bf16
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [(1,), (1, 7), (200,)])
def test_products_and_bytes(bias: bool, tokens: tuple[int, ...]) -> None:
    plain = linear(128, 192, bias)
    packed = prepack(plain, HERE)
    assert isinstance(packed, PrepackedLinear)
    x = torch.randn(*tokens, 128).bfloat16()
    exact = nn.functional.linear(
        x.double(), plain.weight.double(), plain.bias.double() if bias else None
    )
    out = packed(x)
    assert out.dtype == torch.bfloat16
    # Products summed in float32, the result rounded once.
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)
    assert module_nbytes(packed) == module_nbytes(plain)


@pytest.mark.parametrize(
    ("columns", "rows", "bias"), [(1, 1, False), (7, 3, True), (1024, 18, True), (2500, 33, False)]
)
def test_widened_products(columns: int, rows: int, bias: bool) -> None:
    """Parts of rows, of blocks and of what is summed at once, for few tokens and for many."""
    plain = linear(columns, rows, bias)
    for tokens in (1, 3, 8, 31, 40):
        x = torch.randn(tokens, columns).bfloat16()
        x[0, 0] = torch.nan
        exact = nn.functional.linear(
            x.double(), plain.weight.double(), plain.bias.double() if bias else None
        )
        out = widened.multiply(x, plain.weight, plain.bias)
        torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize(
    ("plain", "processor"),
    [
        (linear(128, 192, False, torch.float32), HERE),
        (linear(72, 100, False), HERE),  # blocks would be padded
        (linear(128, 192, False), Processor(instruction_sets=frozenset())),
        (linear(128, 192, False), Processor(compute_capability=(8, 0))),
    ],
)
def test_what_stays(plain: nn.Linear, processor: Processor) -> None:
    assert prepack(plain, processor) is plain


@needs_bf16
def test_only_plain_linears_of_a_module_change() -> None:
    class Own(nn.Linear):
        pass

    module = nn.Sequential(linear(128, 128, True), nn.LayerNorm(128), Own(128, 128))
    prepack_linears(module, HERE)
    assert [type(child) for child in module] == [PrepackedLinear, nn.LayerNorm, Own]
