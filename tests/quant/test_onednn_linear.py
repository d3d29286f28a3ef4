"""Prepacked 16-bit linears against float64, and when a linear stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quant.backends.cpu import widened
from quant.devices import emulates, local_processor, prefers_float32
from quant.linear import PrepackedLinear, prepack, prepack_linears
from quant.loading.loader import module_nbytes
from quant.scheme import Processor

HERE_DEVICE = torch.device("cpu")
HERE = local_processor(HERE_DEVICE)
needs_bf16 = pytest.mark.skipif(
    "avx512_bf16" not in HERE.instruction_sets, reason="needs a CPU with AVX-512 BF16"
)


def linear(columns: int, rows: int, bias: bool, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(columns, rows, bias=bias, dtype=dtype).requires_grad_(False)


@needs_bf16
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [(1,), (1, 7), (200,)])
@pytest.mark.parametrize("is_wide", [False, True])
def test_products_and_bytes(
    bias: bool, tokens: tuple[int, ...], is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quant.linear.prefers_float32", lambda dtype, device, rows: is_wide)
    plain = linear(128, 64 * 9, bias)  # more than one product of panels
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


@needs_bf16
@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="tiles have panels of another width, and are fast"
)
def test_panels() -> None:
    assert widened.lies_in_panels(192, 128)
    assert not widened.lies_in_panels(100, 72)
    numbers = torch.arange(1.0, 193).repeat(128, 1).T.bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(numbers, None)
    restored = widened.multiply_panels(torch.eye(128).bfloat16(), packed, 192)
    assert torch.equal(restored, numbers.T)


def test_float32_is_for_many_rows_of_a_type_that_is_slower() -> None:
    cpu = HERE_DEVICE
    assert prefers_float32(torch.float16, cpu, 1)  # emulated everywhere
    assert not prefers_float32(torch.float32, cpu, 4096)
    assert not prefers_float32(torch.bfloat16, torch.device("cuda", 0), 4096)
    few = prefers_float32(torch.bfloat16, cpu, 1)
    assert few == emulates(torch.bfloat16, cpu)


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
