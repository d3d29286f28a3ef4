"""The layout that the CUDA kernels read and its twin in torch; on a GPU, the kernels themselves."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from quant.backends.cuda.driver import Kernels
from quant.backends.cuda.packed import (
    Cuda3Bit,
    Cuda4Bit,
    Cuda5Bit,
    Cuda6Bit,
    Cuda8Bit,
    pack_octets,
    unpack_octets,
)
from quant.backends.kernel_classes import self_test
from quant.backends.table import rule_for
from quant.common.errors import SpecError
from quant.rounding.canonical import CanonicalWeight, dequantize, quantize
from quant.scheme import LinearShape, Processor

CPU = torch.device("cpu")
BACKENDS = {3: Cuda3Bit, 4: Cuda4Bit, 5: Cuda5Bit, 6: Cuda6Bit, 8: Cuda8Bit}
SHAPES = ((8, 32), (13, 96), (40, 192), (9, 2560))
V100 = Processor(compute_capability=(7, 0))
H200 = Processor(compute_capability=(9, 0))


def random_codes(rows: int, columns: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)


def code_at(packed: torch.Tensor, bits: int, row: int, column: int) -> int:
    """The code, read as the source's header describes the layout."""
    octet, i = divmod(column, 8)
    if bits == 4:
        number = bytes(packed[row, 4 * octet : 4 * octet + 4].tolist())
    else:
        words = [
            word.to_bytes(4, "little", signed=True) for word in packed[row, :, octet // 4].tolist()
        ]
        number = b"".join(words)[bits * (octet % 4) :][:bits]
    return int.from_bytes(number, "little") >> bits * i & ((1 << bits) - 1)


@pytest.mark.parametrize("bits", [3, 4, 5, 6])
def test_layout_bit_by_bit(bits: int) -> None:
    codes = random_codes(3, 96, bits)
    packed = pack_octets(codes, bits)
    found = [[code_at(packed, bits, row, column) for column in range(96)] for row in range(3)]
    assert found == codes.tolist()


@pytest.mark.parametrize("bits", [3, 4, 5, 6])
@pytest.mark.parametrize("shape", [*SHAPES, (700, 1024)])
def test_packing_round_trip(bits: int, shape: tuple[int, int]) -> None:
    codes = random_codes(*shape, bits)
    packed = pack_octets(codes, bits)
    assert torch.equal(unpack_octets(packed, bits), codes)
    assert torch.equal(unpack_octets(packed[2:5], bits), codes[2:5])


@pytest.mark.parametrize("bits", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_twin_decodes_what_the_codes_stand_for(bits: int, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    packed = BACKENDS[bits].from_weight(weight, torch.float32, CPU)
    meant = dequantize(quantize(weight, bits))
    assert torch.equal(packed.decode_rows(slice(0, shape[0])), meant)
    x = torch.randn(2, 3, shape[1])
    torch.testing.assert_close(packed.forward(x), x @ meant.t(), rtol=1e-4, atol=1e-4)
    assert self_test(BACKENDS[bits], torch.float32, CPU) is None


@pytest.mark.parametrize("bits", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_of_the_rule_and_of_the_fallback(bits: int, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    packed = BACKENDS[bits].from_weight(weight, torch.float16, CPU)
    linear = LinearShape(in_features=shape[1], out_features=shape[0])
    planned = rule_for(V100, bits, linear, "float16", f"cuda_{bits}bit").nbytes(linear, "float16")
    assert packed.nbytes == planned
    assert planned == rule_for(V100, bits, linear, "float16", f"torch_{bits}bit").nbytes(
        linear, "float16"
    )


@pytest.mark.parametrize(
    ("processor", "dtype", "shape", "taken"),
    [
        (V100, "float16", (8, 32), True),
        (V100, "bfloat16", (8, 32), False),
        (V100, "float32", (8, 32), False),
        (H200, "bfloat16", (8, 32), True),
        (H200, "bfloat16", (7, 32), False),
        (H200, "bfloat16", (8, 48), False),
        (Processor(compute_capability=(5, 2)), "float16", (8, 32), False),
        (Processor(), "float16", (8, 32), False),
    ],
)
def test_what_the_kernels_take(
    processor: Processor, dtype: str, shape: tuple[int, int], taken: bool
) -> None:
    linear = LinearShape(in_features=shape[1], out_features=shape[0])
    assert (rule_for(processor, 3, linear, dtype).name == "cuda_3bit") is taken


def test_a_group_that_the_kernels_do_not_read() -> None:
    canonical = quantize(torch.randn(8, 100), 3)
    with pytest.raises(SpecError, match=r"groups of 128, 64, 32 columns, not 100; .* torch_3bit"):
        Cuda3Bit.from_canonical(canonical)


def test_a_thread_that_has_not_used_the_gpu_launches_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes, synchronized = [0, 201], []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    driver = SimpleNamespace(cuLaunchKernel=lambda *_: codes.pop())
    Kernels(driver, {"restore": ctypes.c_void_p()}, CPU).launch("restore", 1, 7)  # type: ignore[arg-type]
    assert codes == []
    assert synchronized == [CPU]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", BACKENDS)
@pytest.mark.parametrize("shape", [(8, 32), (21, 192), (4096, 4096), (1000, 11008), (28672, 7168)])
def test_products_on_a_gpu(bits: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Every way against float64 on the GPU: half a unit of the type for outputs and for restored
    weights, sums in float32.
    """
    device = torch.device("cuda")
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        dtype = torch.float16
    generator = torch.Generator(device).manual_seed(3)
    canonical: CanonicalWeight = quantize(
        torch.randn(shape, generator=generator, device=device), bits
    )
    packed = BACKENDS[bits].from_canonical(canonical)
    meant = dequantize(canonical).double()
    steps = canonical.scale.double().amax(-1)
    for tokens in (1, 2, 3, 7, 8, 17, 33, 64, 65, 129, 200):
        x = torch.randn(tokens, shape[1], generator=generator, device=device).to(dtype)
        exact = x.double() @ meant.t()
        sizes = x.double().abs()
        half_unit = torch.finfo(dtype).eps / 2
        limit = half_unit * exact.abs() * 1.01
        limit += 4 * 512 * torch.finfo(torch.float32).eps * sizes.sum(-1, keepdim=True) * steps
        limit += 1.01 * half_unit * (sizes @ meant.abs().t())
        for product in (packed.forward(x), *packed.products(x)):
            assert ((product.double() - exact).abs() <= limit).all(), tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_run_on_the_current_stream() -> None:
    """Queued behind what the same stream still has to do, and not before it."""
    device = torch.device("cuda")
    weight = torch.randn(4096, 4096, device=device)
    packed = Cuda4Bit.from_weight(weight, torch.float16, device)
    x = torch.randn(1, 4096, device=device).half()
    wanted = packed.forward(x)
    late = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):  # keeps the stream busy for longer than the launches take
            weight = weight @ weight
        late.copy_(x)
        out = packed.forward(late)
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
