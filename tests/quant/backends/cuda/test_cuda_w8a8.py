"""8-bit codes on GPUs: the CUDA source, run on the CPU by an emulator, against exact integers."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from quant.backends.cuda.driver import CudaError
from quant.backends.cuda.packed import Cuda8Bit
from quant.backends.cuda.w8a8 import (
    KERNELS,
    SOURCE,
    CodeProducts,
    CudaW8A8,
    ProductShape,
    _library_multiplies,
)
from quant.backends.kernel_classes import self_test, usable_backend
from quant.backends.table import LIBRARY_TOKENS, rule_for
from quant.loading.emulated_kernels import represented_product
from quant.rounding.canonical import quantize
from quant.rounding.importance import InputStatistics
from quant.rounding.rotation import MIDDLE, RotatedCodes, round_activations
from quant.rounding.ways import Rounding
from quant.scheme import LinearShape, Processor
from tests.cuda_emulation import CPU, check_machine_code, emulated, needs_compiler, needs_nvrtc

rare = pytest.mark.rare
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
WAYS = {"dp4a": 61, "m8n8k16": 75, "m16n8k32": 80}
"""Instructions that multiply, and the GPU from which on they do."""

CASES = [
    pytest.param(way, dtype, marks=[] if (way == "m16n8k32") == (dtype == "bfloat16") else rare)
    for way in WAYS
    for dtype in DTYPES
]
FEW, MANY = 1, 1000
"""Blocks that a GPU asks for: none is split, or each is as far as it goes."""

SHAPES = ((8, 64), (33, 192), (50, 1088))
"""(out, in): rows that do not fill a block, runs that leave warps without work or go round."""

TOKENS = (1, 8, 11, 29, 64, 70)
"""Each kernel with all and with some of its tokens, and two blocks of tokens."""


def products(
    way: str, dtype: torch.dtype, blocks: int = FEW, library: bool = False
) -> CodeProducts:
    definitions = {"BFLOAT16": int(dtype == torch.bfloat16), "CAPABILITY": WAYS[way]}
    return CodeProducts(emulated(SOURCE, KERNELS, **definitions), blocks, library)


def make(shape: tuple[int, int]) -> CudaW8A8:
    """Codes of the whole range, also of a kind whose sums are the largest there are."""
    generator = torch.Generator().manual_seed(shape[0])
    codes = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    codes[0] = 127
    scale = torch.rand(shape[0], generator=generator) + 0.01
    return CudaW8A8(codes, scale, torch.rand(shape[1], generator=generator) + 0.1)


def activations(tokens: int, columns: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    x[0] *= 10
    x[:, columns // 3] *= 30  # a channel of outliers
    return x


def exact(x: Tensor, packed: CudaW8A8, bias: Tensor | None = None) -> Tensor:
    """Integer sums of the CPU's codes, scaled in float32 and rounded once."""
    codes, scale = round_activations(x, packed.factor)
    sums = (codes.long() - MIDDLE) @ packed.codes.long().t()
    out = sums.float() * packed.scale * scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


@needs_compiler
@pytest.mark.parametrize(("way", "dtype"), [("dp4a", "float16"), ("m16n8k32", "bfloat16")])
@pytest.mark.parametrize("columns", [64, 192, 576, 4160])
def test_codes_and_scales_have_the_bits_of_the_cpus(way: str, dtype: str, columns: int) -> None:
    """Lanes without a column, an odd number of columns, and more than a block holds at once."""
    x = activations(3, columns, DTYPES[dtype])
    x[1] = 0
    x[2] *= 1e-6
    factor = torch.rand(columns, generator=torch.Generator().manual_seed(2)) + 0.1
    counters = torch.ones(300, dtype=torch.int32)
    own = products(way, x.dtype)
    codes, scale = own.rounded(x, factor, counters, 299)
    wanted, wanted_scale = round_activations(x, factor)
    assert torch.equal(codes.int() + MIDDLE, wanted.int())
    assert torch.equal(scale, wanted_scale.view(-1))
    assert counters.tolist() == [0] * 299 + [1]


@needs_compiler
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_stay_in_their_token(bad: float) -> None:
    packed = make((33, 192))
    x = activations(5, 192, torch.float16)
    clean = products("dp4a", x.dtype).multiply(x, packed)
    x[2, 7] = bad
    found = products("dp4a", x.dtype).multiply(x, packed)
    assert not found[2].isfinite().any()
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(found[others], clean[others])


@needs_compiler
@pytest.mark.parametrize(("way", "dtype"), CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_exact_integers(way: str, dtype: str, shape: tuple[int, int]) -> None:
    packed = make(shape)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(3)).to(DTYPES[dtype])
    for tokens in TOKENS if shape[1] < 1000 else (1, 11):
        x = activations(tokens, shape[1], DTYPES[dtype])
        wanted = exact(x, packed)
        for blocks in (FEW, MANY):
            found = products(way, x.dtype, blocks).multiply(x, packed)
            assert found.dtype == x.dtype
            assert torch.equal(found, wanted), (tokens, blocks)
        found = products(way, x.dtype, MANY).multiply(x, packed, bias)
        assert torch.equal(found, exact(x, packed, bias)), tokens


@needs_compiler
@pytest.mark.parametrize(("way", "dtype"), CASES)
def test_no_order_of_threads_and_blocks_matters(way: str, dtype: str) -> None:
    packed, x = make((33, 1088)), activations(11, 1088, DTYPES[dtype])
    own = products(way, x.dtype, MANY)
    try:
        for seed in range(1, 4):
            own.kernels.driver.seed(seed)
            assert torch.equal(own.multiply(x, packed), exact(x, packed)), seed
    finally:
        own.kernels.driver.seed(0)


@needs_compiler
def test_sums_of_a_library_are_scaled() -> None:
    """More rows than ours multiply, where the library takes the weight: a multiple of 8 rows."""
    assert _library_multiplies(CPU)
    for rows in (40, 33):
        packed, x = make((rows, 192)), activations(LIBRARY_TOKENS + 3, 192, torch.bfloat16)
        bias = torch.randn(rows, generator=torch.Generator().manual_seed(3)).bfloat16()
        own = products("m16n8k32", x.dtype, library=True)
        assert torch.equal(own.multiply(x, packed, bias), exact(x, packed, bias))


@needs_compiler
@pytest.mark.parametrize(("way", "dtype"), CASES)
def test_nothing_is_loaded_from_beside_the_tensors(way: str, dtype: str) -> None:
    packed, x = make((33, 192)), activations(5, 192, DTYPES[dtype])
    own = products(way, x.dtype)
    driver, counters = own.kernels.driver, torch.empty(0, dtype=torch.int32)
    codes, scale = own.rounded(x, packed.factor, counters, 0)
    out, shape = x.new_empty(5, 33), ProductShape(5, 33, 3, 1)

    def round_tokens() -> None:
        own.rounded(x, packed.factor, counters, 0)

    def multiply() -> None:
        weight = packed.codes, packed.scale
        for name, blocks in (("8", 3), ("16", 3), ("32", 2), ("64", 2)):
            own.kernels.launch(
                f"multiply_{name}", blocks, codes, scale, *weight, None, out, None, None, shape
            )

    read = {round_tokens: (x, packed.factor), multiply: (codes, scale, packed.codes, packed.scale)}
    for launched, tensors in read.items():
        for missing in (None, *tensors):
            allowed = [tensor for tensor in tensors if tensor is not missing]
            for tensor in allowed:
                address, size = tensor.data_ptr(), tensor.nbytes
                driver.allow(ctypes.c_void_p(address), ctypes.c_size_t(size))
            expected = pytest.raises(CudaError, match="700: illegal address")
            try:
                with nullcontext() if missing is None else expected:
                    launched()
            finally:
                driver.allow_everything()


@needs_compiler
@pytest.mark.parametrize(("way", "dtype"), CASES)
def test_blocks_read_the_weight_once_for_64_tokens(way: str, dtype: str) -> None:
    """And the codes of their tokens once for 16 or 32 rows."""
    rows, columns = 64, 1024
    packed, own = make((rows, columns)), products(way, DTYPES[dtype])
    driver = own.kernels.driver
    driver.moved_bytes.restype = ctypes.c_size_t
    for tokens, block_rows in ((8, 16), (64, 32)):
        x = activations(tokens, columns, DTYPES[dtype])
        driver.moved_bytes()
        own.rounded(x, packed.factor, torch.empty(0, dtype=torch.int32), 0)
        rounding = driver.moved_bytes()
        assert rounding == tokens * (2 + 4) * columns
        own.multiply(x, packed)
        codes = rows * columns + tokens * columns * rows // block_rows
        scales = 4 * (rows + tokens * rows // block_rows)
        assert driver.moved_bytes() - rounding == codes + scales


@needs_compiler
def test_shapes_strides_and_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    own = products("m16n8k32", torch.bfloat16)
    packed, x = make((33, 192)), activations(6, 192, torch.bfloat16)
    plain = exact(x, packed)
    assert torch.equal(packed.multiply(x.view(2, 3, 192), own), plain.view(2, 3, 33))
    for bias in (torch.ones(33, dtype=x.dtype), torch.ones(33)):
        assert torch.equal(packed.multiply(x, own, bias), exact(x, packed, bias))
    assert torch.equal(packed.multiply(x.t().contiguous().t(), own), plain)
    shifted = torch.cat((torch.zeros(1, dtype=x.dtype), x.view(-1)))[1:].view(6, 192)
    assert torch.equal(packed.multiply(shifted, own), plain)
    assert packed.multiply(x[:0].view(0, 1, 192), own).shape == (0, 1, 33)
    monkeypatch.setattr(CudaW8A8, "forward", lambda self, x: self.multiply(x, own))
    assert self_test(CudaW8A8, torch.bfloat16, CPU) is None
    monkeypatch.setattr(CudaW8A8, "forward", lambda self, x: self.multiply(-x, own))
    assert "is off by 200.0%" in str(self_test(CudaW8A8, torch.bfloat16, CPU))


@pytest.mark.parametrize("shape", [(8, 64), (192, 320)])
def test_a_weight_is_that_of_the_cpu_in_the_bytes_of_the_rule(shape: tuple[int, int]) -> None:
    """With statistics of its inputs, and from codes of a checkpoint."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(5)).half()
    x = activations(40, shape[1], torch.float16).float()
    rounding = Rounding(inputs=InputStatistics(x.square().mean(0), x.abs().amax(0)))
    packed = CudaW8A8.from_weight(weight, torch.float16, CPU, rounding)
    twin = RotatedCodes.of_weight(weight, rounding)
    assert torch.equal(packed.codes, twin.codes)
    assert torch.equal(packed.forward(x), twin.forward(x))
    assert torch.equal(
        represented_product("cuda_w8a8", weight, x.dtype, rounding)(x), twin.forward(x)
    )
    assert torch.equal(CudaW8A8.represent(weight, rounding), twin.restored())
    linear = LinearShape(shape[1], shape[0])
    rule = rule_for(Processor(compute_capability=(7, 5)), 8, linear, "float16")
    assert (rule.name, rule.nbytes(linear, "float16")) == ("cuda_w8a8", packed.nbytes)
    canonical = quantize(weight, 8)
    again = CudaW8A8.from_canonical(canonical)
    assert torch.equal(again.codes, RotatedCodes.of_canonical(canonical).codes)


def test_where_codes_are_multiplied_wrongly_weights_alone_are_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CudaW8A8, "forward", lambda self, x: x.new_zeros(*x.shape[:-1], 192))
    usable_backend.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="cuda_w8a8 is not usable .* cuda_8bit takes its"):
            assert usable_backend("cuda_w8a8", 8, torch.float16, CPU) is Cuda8Bit
    finally:
        usable_backend.cache_clear()


@pytest.mark.parametrize(
    ("capability", "dtype", "shape", "backend"),
    [
        ((6, 0), "float16", (8, 64), "cuda_8bit"),
        ((6, 1), "float16", (8, 64), "cuda_w8a8"),
        ((7, 0), "float16", (8, 64), "cuda_8bit"),
        ((7, 5), "float16", (8, 64), "cuda_w8a8"),
        ((9, 0), "bfloat16", (8, 64), "cuda_w8a8"),
    ],
)
def test_what_the_kernels_take(
    capability: tuple[int, int], dtype: str, shape: tuple[int, int], backend: str
) -> None:
    linear = LinearShape(in_features=shape[1], out_features=shape[0])
    assert rule_for(Processor(compute_capability=capability), 8, linear, dtype).name == backend


@needs_nvrtc
@pytest.mark.parametrize(
    "capability",
    [
        *((7, 5), (8, 0)),
        *(
            pytest.param(each, marks=rare)
            for each in ((6, 1), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
        ),
    ],
)
def test_compiles_without_spills(capability: tuple[int, int]) -> None:
    definitions = {"CAPABILITY": 10 * capability[0] + capability[1]}
    definitions["BFLOAT16"] = int(capability >= (8, 0))
    check_machine_code(SOURCE, KERNELS, capability, **definitions)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(8, 64), (50, 1088), (4096, 4096), (1000, 11008), (1024, 8192)])
def test_products_on_a_gpu(shape: tuple[int, int]) -> None:
    """Against exact integers on the CPU, by our kernels and the library."""
    device = torch.device("cuda")
    packed = make(shape)
    held = CudaW8A8(*(each.to(device) for each in (packed.codes, packed.scale, packed.factor)))
    for tokens in (*TOKENS, 300):
        x = activations(tokens, shape[1], torch.float16)
        assert torch.equal(held.forward(x.to(device)).cpu(), exact(x, packed)), tokens
