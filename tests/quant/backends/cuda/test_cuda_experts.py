"""Products of experts as they are asked, by the emulated kernel, against decoded weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quant.backends.cuda.packed import CudaPacked, _asked_complaint, asked_products, trial
from quant.backends.cuda.products import KERNELS, SOURCE, CudaProducts
from quant.backends.kernel_classes import BACKENDS
from quant.experts import ExpertWeights, QuantizedExperts, packed_expert
from quant.linear import LayerForm
from quant.scheme import LinearShape, Processor
from tests.cuda_emulation import emulated, needs_compiler

pytestmark = needs_compiler
EXPERTS, HIDDEN, WIDTH = 5, 128, 64
CPU = torch.device("cpu")
CASES = [
    (4, torch.float16),
    pytest.param(3, torch.float16, marks=pytest.mark.rare),
    pytest.param(8, torch.float16, marks=pytest.mark.rare),
    pytest.param(4, torch.bfloat16, marks=pytest.mark.rare),
]


def products(bits: int, dtype: torch.dtype) -> CudaProducts:
    is_bfloat16 = int(dtype == torch.bfloat16)
    capability = 80 if is_bfloat16 else 60
    kernels = emulated(SOURCE, KERNELS, BITS=bits, BFLOAT16=is_bfloat16, CAPABILITY=capability)
    return CudaProducts(kernels, dtype, multiprocessors=2)


def experts(bits: int, dtype: torch.dtype) -> QuantizedExperts:
    capability = (8, 0) if dtype == torch.bfloat16 else (7, 0)
    form = LayerForm(bits, Processor(capability), dtype, CPU, f"cuda_{bits}bit")
    held = []
    for shape in (LinearShape(HIDDEN, 2 * WIDTH), LinearShape(WIDTH, HIDDEN)):
        weights = ExpertWeights(shape, EXPERTS)
        for index in range(EXPERTS):
            weight = torch.randn(shape.out_features, shape.in_features) * 0.1
            weights.add(packed_expert(weight, form, f"{index}", None), dtype)
        held.append(weights)

    def gate(grown: Tensor) -> Tensor:
        one, other = grown.chunk(2, -1)
        return functional.silu(one) * other

    made = QuantizedExperts(held[0], held[1], gate, form)
    for name, width in (("gate_up_proj_bias", 2 * WIDTH), ("down_proj_bias", HIDDEN)):
        bias = torch.randn(EXPERTS, width).to(dtype)
        setattr(made, name, nn.Parameter(bias, requires_grad=False))
    return made


@pytest.mark.parametrize(("bits", "dtype"), CASES)
def test_experts_are_multiplied_as_they_are_asked(
    bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one launch for each weight; of more tokens experts are multiplied one after another."""
    torch.manual_seed(0)
    made = experts(bits, dtype)
    assert issubclass(made.gate_up.backend, CudaPacked)
    hidden = torch.randn(6, HIDDEN).to(dtype)
    weights, index = torch.rand(6, EXPERTS).topk(2)
    wanted = made(hidden[:5], index[:5], weights[:5].to(dtype))
    launched: list[str] = []
    own = products(bits, dtype)

    def launch(name: str, *arguments: Any) -> None:
        launched.append(name)
        own._kernels.launch(name, *arguments)

    class Watched:
        functions = own._kernels.functions
        stream = 0

    Watched.launch = staticmethod(launch)  # type: ignore[attr-defined]
    watched = CudaProducts(Watched, dtype, multiprocessors=2)  # type: ignore[arg-type]
    monkeypatch.setattr(CudaPacked, "kernels", lambda packed, kind: watched)
    monkeypatch.setattr("quant.experts._asked_products", lambda *_: watched)
    found = made(hidden[:5], index[:5], weights[:5].to(dtype))
    assert launched == ["one_expert"] * 2
    assert (found - wanted).float().norm() <= 0.01 * wanted.float().norm()
    made(hidden, index, weights.to(dtype))
    assert "one_expert" not in launched[2:]


@pytest.mark.parametrize(("bits", "dtype"), CASES)
def test_the_self_test_finds_a_kernel_that_reads_another_expert(
    bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, own = BACKENDS[f"cuda_{bits}bit"], products(bits, dtype)
    assert issubclass(backend, CudaPacked)
    assert _asked_complaint(trial(backend, (120, 256), False, CPU), own, dtype) is None
    multiply = own.multiply_asked
    monkeypatch.setattr(
        own, "multiply_asked", lambda codes, rows, x, asked: multiply(codes, rows, x, asked.flip(0))
    )
    monkeypatch.setattr(CudaPacked, "kernels", lambda packed, kind: own)
    with pytest.warns(RuntimeWarning, match="multiplied one after another"):
        assert asked_products(backend, False, dtype, CPU) is None
