from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from quant.backends.base import copy_of
from quant.backends.kernel_classes import BACKENDS, usable_backend
from quant.backends.portable import Torch8Bit
from quant.backends.table import rule_for
from quant.common.errors import CheckpointError, DeviceError, SpecError
from quant.devices import local_processor
from quant.linear import LayerForm, QuantizedLinear, quantize_linear
from quant.loading.loader import module_nbytes
from quant.rounding.canonical import dequantize, quantize
from quant.scheme import BITWIDTHS, LinearShape, Processor

CPU = torch.device("cpu")
HERE = local_processor(CPU)
PLAIN_CPU = Processor(instruction_sets=frozenset())


@pytest.fixture(autouse=True)
def _forget_chosen_backends() -> Iterator[None]:
    """Choices are cached per process; a test here replaces a backend."""
    usable_backend.cache_clear()
    yield
    usable_backend.cache_clear()


def weight_and_bias(rows: int = 64, columns: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(rows, columns, generator=generator)
    return weight.half(), torch.randn(rows, generator=generator).half()


@pytest.mark.parametrize("bits", BITWIDTHS[:-1])
@pytest.mark.parametrize("with_bias", [True, False])
def test_product_with_bias_in_float32(bits: int, with_bias: bool) -> None:
    weight, bias = weight_and_bias()
    linear = quantize_linear(
        weight, bias if with_bias else None, LayerForm(bits, PLAIN_CPU, torch.float32, CPU)
    )
    x = torch.randn(2, 5, 128)
    expected = nn.functional.linear(
        x, dequantize(quantize(weight, bits)), bias.float() if with_bias else None
    )
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", BITWIDTHS)
def test_type_of_the_input_is_kept(bits: int) -> None:
    weight, bias = weight_and_bias()
    linear = quantize_linear(weight, bias, LayerForm(bits, HERE, torch.bfloat16, CPU))
    assert linear(torch.randn(3, 128, dtype=torch.bfloat16)).dtype == torch.bfloat16
    if bits != 16:
        assert linear(torch.randn(3, 128)).dtype == torch.float32


def test_sixteen_bits_is_a_plain_linear_of_its_own_memory() -> None:
    weight, bias = weight_and_bias()
    linear = quantize_linear(weight, bias, LayerForm(16, HERE, torch.float16, CPU))
    assert type(linear) is nn.Linear
    assert torch.equal(linear.weight, weight)
    assert torch.equal(linear.bias, bias)
    assert linear.weight.data_ptr() != weight.data_ptr()
    assert linear.bias.data_ptr() != bias.data_ptr()
    assert module_nbytes(linear) == 2 * (weight.numel() + bias.numel())


@pytest.mark.parametrize("bits", BITWIDTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(64, 128), (50, 100)])
def test_bytes_are_the_rule_plus_the_bias(bits: int, dtype: str, shape: tuple[int, int]) -> None:
    weight, bias = weight_and_bias(*shape)
    linear = quantize_linear(weight, bias, LayerForm(bits, HERE, getattr(torch, dtype), CPU))
    rule = rule_for(HERE, bits, LinearShape(shape[1], shape[0]), dtype)
    bias_bytes = shape[0] * (4 if dtype == "float32" else 2)
    assert module_nbytes(linear) == rule.nbytes(LinearShape(shape[1], shape[0]), dtype) + bias_bytes


def test_named_backend() -> None:
    weight, _ = weight_and_bias()
    linear = quantize_linear(weight, None, LayerForm(8, HERE, torch.bfloat16, CPU, "torch_8bit"))
    assert isinstance(linear, QuantizedLinear)
    assert isinstance(linear.packed, Torch8Bit)
    assert "bits=8, backend=Torch8Bit" in repr(linear)
    with pytest.raises(SpecError, match="no backend 'torch_4bit' for 8 bits"):
        quantize_linear(weight, None, LayerForm(8, HERE, torch.bfloat16, CPU, "torch_4bit"))


def test_compute_type_that_no_rule_knows() -> None:
    with pytest.raises(SpecError, match="compute type 'float64'"):
        quantize_linear(*weight_and_bias(), LayerForm(4, HERE, torch.float64, CPU))


def test_damaged_weight() -> None:
    weight, _ = weight_and_bias()
    weight[3, 3] = float("nan")
    with pytest.raises(CheckpointError, match="NaN"):
        quantize_linear(weight, None, LayerForm(4, PLAIN_CPU, torch.float32, CPU))


class Padded(Torch8Bit):
    """A backend that holds more than its rule says."""

    @property
    def nbytes(self) -> int:
        return super().nbytes + 64


def test_more_bytes_than_planned_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "torch_8bit", Padded)
    with pytest.raises(DeviceError, match=r"in 8512 bytes but plans count 8448"):
        quantize_linear(
            weight_and_bias()[0], None, LayerForm(8, PLAIN_CPU, torch.float16, CPU, "torch_8bit")
        )


class CopyRecorder(TorchDispatchMode):
    """Notes how many elements each copy moves."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy" in str(func):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(3000, 1024), (700,), (), (0, 8), (5, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_copies_go_in_blocks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Torch casts what goes to a GPU in host memory, so that a copy of the whole would be one."""
    tensor = torch.randn(shape).half()
    with CopyRecorder() as recorder:
        copied = copy_of(tensor, dtype, CPU)
    assert torch.equal(copied, tensor.to(dtype))
    assert copied.data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert max(recorder.sizes, default=0) <= 1 << 19
    assert sum(recorder.sizes) == tensor.numel()
