"""The CUDA source itself, run on the CPU by an emulator of blocks, warps and their barriers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from quant.backends.cuda_driver import CudaError, Kernels
from quant.backends.cuda_packed import KERNELS, SOURCE, Cuda3Bit, Cuda4Bit, Cuda8Bit, CudaPacked
from quant.backends.kernel_classes import self_test
from quant.backends.table import FUSED_TOKENS
from quant.rounding import canonical as canonical_module
from quant.rounding.canonical import CanonicalWeight, dequantize, quantize
from tests.cuda_emulation import CPU, emulated, needs_compiler

pytestmark = needs_compiler

BACKENDS = {3: Cuda3Bit, 4: Cuda4Bit, 8: Cuda8Bit}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SHAPES = ((8, 32), (11, 96), (21, 192), (16, 1056), (9, 4224))
"""(out, in): groups of 32, 64 and 128, rows that leave threads without work or take them round the
loop twice, rows that the last blocks share."""
TOKENS = (1, 2, 3, 4, 5, 8, 9, 24, 25)
"""Each kernel with all and with some of its tokens, and the restored weight."""

Emulate = Callable[[int, torch.dtype], Kernels]


@pytest.fixture
def emulate() -> Emulate:
    return lambda bits, dtype: emulated(
        SOURCE, KERNELS, BITS=bits, BFLOAT16=int(dtype == torch.bfloat16)
    )


def make(bits: int, shape: tuple[int, int]) -> tuple[CudaPacked, CanonicalWeight]:
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator) + 0.5
    weight[shape[0] // 2] *= 10
    canonical = quantize(weight, bits)
    return BACKENDS[bits].from_canonical(canonical), canonical


def activations(tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    x[0] *= 10
    x[:, columns // 3] *= 30  # a channel of outliers
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_against_float64(
    emulate: Emulate, bits: int, dtype: str, shape: tuple[int, int]
) -> None:
    """Off by half a unit of the output's type, and by sums in float32.

    One token sums codes that are offset by up to 64 at 3 bit and 16 at 4 bit, 512 and 256 steps;
    8-bit codes are offset by 256 steps. Four roundings of the largest are allowed for each term.
    Restored weights are themselves rounded to the type, by half a unit.
    """
    packed, canonical = make(bits, shape)
    meant = dequantize(canonical).double()
    steps = canonical.scale.double().amax(-1)
    for tokens in TOKENS:
        x = activations(tokens, shape[1], DTYPES[dtype])
        out = packed.multiply(x, emulate(bits, x.dtype))
        exact = x.double() @ meant.t()
        sizes = x.double().abs()
        half_unit = torch.finfo(x.dtype).eps / 2
        limit = half_unit * exact.abs()
        limit += 4 * 512 * torch.finfo(torch.float32).eps * sizes.sum(-1, keepdim=True) * steps
        if tokens > FUSED_TOKENS:
            limit += half_unit * (sizes @ meant.abs().t()) * 1.01
        assert out.dtype == x.dtype
        assert out.shape == exact.shape
        assert ((out.double() - exact).abs() <= limit).all(), tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BACKENDS)
def test_every_weight_alone(emulate: Emulate, bits: int, dtype: str) -> None:
    """Products with unit vectors are the weights, through every kernel, rounded once."""
    packed, canonical = make(bits, (9, 96))
    meant = dequantize(canonical)
    units = torch.eye(96, dtype=DTYPES[dtype])
    eps = torch.finfo(DTYPES[dtype]).eps
    for tokens in (1, 4, 8, 96):
        parts = [packed.multiply(x, emulate(bits, x.dtype)) for x in units.split(tokens)]
        out = torch.cat(parts).t().float()
        torch.testing.assert_close(out, meant, rtol=eps / 2, atol=1e-5)


@pytest.mark.parametrize("bits", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_that_of_quantizing(emulate: Emulate, bits: int, dtype: str) -> None:
    """Against the weight before quantizing, with what the type itself rounds set aside."""
    weight = torch.randn(40, 512, generator=torch.Generator().manual_seed(1))
    packed = BACKENDS[bits].from_weight(weight, DTYPES[dtype], CPU)
    meant = BACKENDS[bits].represent(weight).double()
    for tokens in TOKENS:
        x = activations(tokens, 512, DTYPES[dtype])
        exact = x.double() @ weight.double().t()
        unavoidable = ((x.double() @ meant.t()).to(x.dtype).double() - exact).norm()
        error = (packed.multiply(x, emulate(bits, x.dtype)).double() - exact).norm()
        assert error <= 1.1 * unavoidable


@pytest.mark.parametrize("bits", BACKENDS)
def test_restored_in_blocks(emulate: Emulate, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setitem(canonical_module._BLOCK_WEIGHTS, "cpu", 5 * 96)
    packed, _ = make(bits, (21, 96))
    x = activations(30, 96, torch.float16)
    together = packed.multiply(x, emulate(bits, x.dtype))
    monkeypatch.undo()
    assert torch.equal(packed.multiply(x, emulate(bits, x.dtype)), together)


@pytest.mark.parametrize("bits", BACKENDS)
def test_shapes_and_strides_of_activations(emulate: Emulate, bits: int) -> None:
    packed, _ = make(bits, (16, 64))
    kernels = emulate(bits, torch.float16)
    x = activations(6, 64, torch.float16)
    plain = packed.multiply(x, kernels)
    assert torch.equal(packed.multiply(x.view(2, 3, 64), kernels), plain.view(2, 3, 16))
    assert torch.equal(packed.multiply(x.t().contiguous().t(), kernels), plain)
    shifted = torch.cat((torch.zeros(1, dtype=x.dtype), x.view(-1)))[1:].view(6, 64)
    assert shifted.data_ptr() % 16 != 0
    assert torch.equal(packed.multiply(shifted, kernels), plain)
    assert packed.multiply(x[:0].view(0, 1, 64), kernels).shape == (0, 1, 16)


@pytest.mark.parametrize("bits", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_passes_the_self_test(
    emulate: Emulate, monkeypatch: pytest.MonkeyPatch, bits: int, dtype: str
) -> None:
    kernels = emulate(bits, DTYPES[dtype])
    monkeypatch.setattr(CudaPacked, "forward", lambda self, x: self.multiply(x, kernels))
    assert self_test(BACKENDS[bits], DTYPES[dtype], CPU) is None
    monkeypatch.setattr(CudaPacked, "forward", lambda self, x: self.multiply(-x, kernels))
    assert "is off by 200.0%" in str(self_test(BACKENDS[bits], DTYPES[dtype], CPU))


@pytest.mark.parametrize("bits", BACKENDS)
@pytest.mark.parametrize("shape", [(8, 32), (11, 96), (9, 2080)])
def test_nothing_is_loaded_from_beside_the_tensors(
    emulate: Emulate, bits: int, shape: tuple[int, int]
) -> None:
    packed, _ = make(bits, shape)
    kernels = emulate(bits, torch.float16)
    for tokens in TOKENS:
        x = activations(tokens, shape[1], torch.float16)
        for tensor in (x, packed.packed, packed.scales):
            kernels.driver.allow(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes))
        try:
            packed.multiply(x, kernels)
            kernels.driver.allow_everything()
            kernels.driver.allow(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes))
            with pytest.raises(CudaError, match="700: illegal address"):
                packed.multiply(x, kernels)
        finally:
            kernels.driver.allow_everything()


def test_driver_errors_say_what_happened(emulate: Emulate) -> None:
    packed, _ = make(4, (8, 32))
    kernels = emulate(4, torch.float16)
    x = torch.zeros(33, dtype=torch.float16)[1:].view(1, 32)
    with pytest.raises(CudaError, match="716: misaligned address"):
        packed._multiply_packed(x, torch.zeros(1, 8, dtype=torch.float16), kernels)
    with pytest.raises(CudaError, match="error 1: invalid value"):
        kernels.launch("restore", 0)
