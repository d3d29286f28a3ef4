"""The CUDA sources, run on the CPU by an emulator of blocks, warps and their barriers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from quant import devices
from quant.backends.cuda.driver import CudaError, Kernels
from quant.backends.cuda.packed import (
    Cuda3Bit,
    Cuda4Bit,
    Cuda5Bit,
    Cuda6Bit,
    Cuda8Bit,
    CudaPacked,
    _asked_complaint,
    tensor_cores_complaint,
    trial,
)
from quant.backends.cuda.products import (
    KERNELS,
    PACKED,
    RESTORED,
    SOURCE,
    TENSOR,
    TENSOR_KERNELS,
    CudaProducts,
    Grid,
    Product,
    _arrived,
)
from quant.backends.kernel_classes import self_test
from quant.backends.table import rule_for
from quant.linear import QuantizedLinear
from quant.rounding.canonical import CanonicalWeight, dequantize, quantize
from quant.rounding.ways import affine_codes
from quant.scheme import (
    NARROW_GROUP,
    SUPER_BLOCK,
    LinearShape,
    Processor,
    ScaleForm,
    group_size,
)
from tests.cuda_emulation import CPU, emulated, needs_compiler

pytestmark = needs_compiler

BACKENDS = {3: Cuda3Bit, 4: Cuda4Bit, 5: Cuda5Bit, 6: Cuda6Bit, 8: Cuda8Bit}
SHAPES = ((8, 32), (11, 96), (21, 192), (16, 1056), (9, 4224))
"""(out, in): narrow groups of 32, stored ones of 64 and 128, rows that leave threads without work
or take them round the loop twice, rows that the last blocks share."""
TENSOR_SHAPES = ((8, 32), (11, 96), (130, 192), (161, 544))
"""The same, and two blocks of rows, whole and broken runs of 128 columns, several of them."""
TOKENS = {PACKED: (1, 2, 3, 4, 5, 8, 9, 24), RESTORED: (25,), TENSOR: (1, 8, 11)}
"""Each kernel with all and with some of its tokens."""
MULTIPROCESSORS = 5
"""For which columns are split in two or more, and not all by as much."""


class Case(NamedTuple):
    capability: int
    bits: int
    dtype: torch.dtype
    super_blocks: bool = False

    @property
    def kernels(self) -> Kernels:
        names = (*KERNELS, *TENSOR_KERNELS) if self.capability >= 70 else KERNELS
        return emulated(
            SOURCE, names, BITS=self.bits, BFLOAT16=int(self.dtype == torch.bfloat16),
            CAPABILITY=self.capability, SUPER_BLOCKS=int(self.super_blocks),
        )  # fmt: skip

    @property
    def products(self) -> CudaProducts:
        return CudaProducts(self.kernels, self.dtype, MULTIPROCESSORS)

    @property
    def half_unit(self) -> float:
        return torch.finfo(self.dtype).eps / 2

    def make(self, shape: tuple[int, int]) -> tuple[CudaPacked, CanonicalWeight]:
        """Rows of whole super-blocks, where those are asked for."""
        rows, columns = shape
        if not self.super_blocks:
            return make(self.bits, shape)
        canonical = of_super_blocks((rows, -(-columns // SUPER_BLOCK) * SUPER_BLOCK), self.bits)
        return BACKENDS[self.bits].from_canonical(canonical), canonical


FIRST = (
    Case(70, 4, torch.float16),
    Case(70, 6, torch.float16),
    Case(75, 8, torch.float16),
    Case(80, 3, torch.bfloat16),
    Case(80, 5, torch.bfloat16),
)
"""Each instruction, each bitwidth and both types; the others are rare."""
CASES = [
    pytest.param(
        case,
        id=f"{case.capability}-{case.bits}bit-{str(case.dtype)[6:]}",
        marks=() if case in FIRST else pytest.mark.rare,
    )
    for bits in BACKENDS
    for case in (
        *(Case(capability, bits, torch.float16) for capability in (60, 70, 75, 80)),
        Case(80, bits, torch.bfloat16),
    )
]
SUPER_FIRST = Case(70, 6, torch.float16, True), Case(80, 4, torch.bfloat16, True)
SUPER_CASES = [
    pytest.param(
        case,
        id=f"{case.capability}-super-{case.bits}bit-{str(case.dtype)[6:]}",
        marks=() if case in SUPER_FIRST else pytest.mark.rare,
    )
    for bits in (4, 5, 6)
    for case in (
        *(Case(capability, bits, torch.float16, True) for capability in (60, 70, 75, 80)),
        Case(80, bits, torch.bfloat16, True),
    )
]
for_cases = pytest.mark.parametrize("case", CASES)
for_all_forms = pytest.mark.parametrize("case", [*CASES, *SUPER_CASES])


def make(bits: int, shape: tuple[int, int]) -> tuple[CudaPacked, CanonicalWeight]:
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator) + 0.5
    weight[shape[0] // 2] *= 10
    group = group_size(shape[1])
    is_stored = bits != 8 and group != NARROW_GROUP
    canonical = of_groups(weight, bits, group) if is_stored else quantize(weight, bits)
    return BACKENDS[bits].from_canonical(canonical), canonical


def of_groups(weight: torch.Tensor, bits: int, group: int) -> CanonicalWeight:
    """Codes with numbers of bfloat16 for each group, as checkpoints store them."""
    grouped = weight.unflatten(1, (-1, group)).clone()
    scale, zero = affine_codes(grouped, bits, None)
    codes = grouped.flatten(1).to(torch.uint8)
    return CanonicalWeight(codes, scale.bfloat16(), zero.bfloat16(), bits, group)


def of_super_blocks(shape: tuple[int, int], bits: int) -> CanonicalWeight:
    """Random codes, and scales and zeros from random numbers as the format defines them."""
    generator, (rows, columns) = torch.Generator().manual_seed(shape[0]), shape
    codes = torch.randint(1 << bits, shape, generator=generator, dtype=torch.uint8)
    blocks, half = columns // SUPER_BLOCK, 1 << (bits - 1)
    heads = (0.01 * torch.randn(rows, blocks, 1 if bits == 6 else 2, generator=generator)).half()
    heads[0] = 0
    low, top = (-128, 128) if bits == 6 else (0, 64)
    factors = torch.randint(low, top, (rows, blocks, 8, 2), generator=generator, dtype=torch.int8)
    factors[1, 0] = low
    of_factors = heads.float().unsqueeze(2) * factors
    if bits == 6:
        scale = of_factors.flatten(1)
        zero = torch.zeros_like(scale)
    else:
        scale = of_factors[..., 0].flatten(1)
        zero = half * scale - of_factors[..., 1].flatten(1)
    parts = heads.view(torch.int8).view(rows, -1, 2), factors.flatten(1, 2)
    return CanonicalWeight(
        codes, scale, zero, bits, columns // scale.shape[1], held=torch.cat(parts, 1)
    )


def activations(tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    x[0] *= 10
    x[:, columns // 3] *= 30  # a channel of outliers
    return x


def check_products(case: Case, way: str, shape: tuple[int, int], numbers: tuple[int, ...]) -> None:
    """Off by half a unit of the output's type, and by sums in float32.

    One token sums codes that are offset by up to 64 at 3 bit and 16 at 4 bit, 512 and 256 steps;
    8-bit codes are offset by 256 steps. Four roundings of the largest are allowed for each term.
    Restored weights are themselves rounded to the type, by half a unit.
    """
    packed, canonical = case.make(shape)
    meant = dequantize(canonical).double()
    steps = canonical.scale.double().abs().amax(-1)
    for tokens in numbers:
        x = activations(tokens, packed.in_features, case.dtype)
        out = case.products.multiply(packed.codes, x, way=way)
        exact = x.double() @ meant.t()
        sizes = x.double().abs()
        limit = case.half_unit * exact.abs()
        limit += 4 * 512 * torch.finfo(torch.float32).eps * sizes.sum(-1, keepdim=True) * steps
        if way != PACKED:
            limit += case.half_unit * (sizes @ meant.abs().t()) * 1.01
        assert out.dtype == x.dtype
        assert out.shape == exact.shape
        assert ((out.double() - exact).abs() <= limit).all(), tokens


@for_all_forms
@pytest.mark.parametrize("shape", SHAPES)
def test_products_against_float64(case: Case, shape: tuple[int, int]) -> None:
    for way in (PACKED, RESTORED):
        check_products(case, way, shape, TOKENS[way])


on_tensor_cores, super_on_tensor_cores = (
    [each for each in cases if each.values[0][0] >= 70] for cases in (CASES, SUPER_CASES)
)
tensor_cases = pytest.mark.parametrize("case", on_tensor_cores)
tensor_cases_of_all_forms = pytest.mark.parametrize(
    "case", [*on_tensor_cores, *super_on_tensor_cores]
)


@tensor_cases_of_all_forms
@pytest.mark.parametrize("shape", TENSOR_SHAPES)
def test_tensor_cores_against_float64(case: Case, shape: tuple[int, int]) -> None:
    check_products(case, TENSOR, shape, TOKENS[TENSOR])


@pytest.mark.rare
@tensor_cases
@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 31, 33, 63, 64, 65, 129])
def test_tensor_cores_by_any_number_of_tokens(case: Case, tokens: int) -> None:
    check_products(case, TENSOR, (133, 416), (tokens,))


@for_all_forms
def test_every_weight_alone(case: Case) -> None:
    """Products with unit vectors are the weights, through every kernel, rounded once."""
    packed, canonical = case.make((9, 96))
    meant, columns = dequantize(canonical), packed.in_features
    units = torch.eye(columns, dtype=case.dtype)
    together = {PACKED: (1, 4, 8), RESTORED: (columns,), TENSOR: (8, 16, 32, 64)}
    for way in case.products.ways:
        for tokens in together[way]:
            parts = [case.products.multiply(packed.codes, x, way=way) for x in units.split(tokens)]
            out = torch.cat(parts).t().float()
            torch.testing.assert_close(out, meant, rtol=case.half_unit, atol=1e-5)


@tensor_cases
@pytest.mark.parametrize("size", [2e-6, 1e-4, 2e4])
def test_weights_at_the_ends_of_float16(case: Case, size: float) -> None:
    """Off by three halves of the smallest step of the type more than a restored weight may be: of
    scale, zero and their sum.
    """
    generator = torch.Generator().manual_seed(5)
    canonical = quantize(torch.randn(9, 96, generator=generator).clamp(-2, 2) * size, case.bits)
    packed, meant = BACKENDS[case.bits].from_canonical(canonical), dequantize(canonical)
    out = case.products.multiply(packed.codes, torch.eye(96, dtype=case.dtype), way=TENSOR).t()
    smallest = torch.finfo(case.dtype).smallest_normal * torch.finfo(case.dtype).eps
    torch.testing.assert_close(out.float(), meant, rtol=case.half_unit, atol=1.5 * smallest)


@for_cases
def test_error_is_that_of_quantizing(case: Case) -> None:
    """Against the weight before quantizing, with what the type itself rounds set aside."""
    weight = torch.randn(40, 512, generator=torch.Generator().manual_seed(1))
    packed = BACKENDS[case.bits].from_weight(weight, case.dtype, CPU)
    meant = BACKENDS[case.bits].represent(weight).double()
    for way in case.products.ways:
        x = activations(9, 512, case.dtype)
        exact = x.double() @ weight.double().t()
        unavoidable = ((x.double() @ meant.t()).to(x.dtype).double() - exact).norm()
        error = (case.products.multiply(packed.codes, x, way=way).double() - exact).norm()
        assert error <= 1.1 * unavoidable


@for_cases
def test_a_bias_is_added(case: Case) -> None:
    """With a bias that takes all but one of four of the products away."""
    packed, _ = make(case.bits, (11, 96))
    for way in case.products.ways:
        for tokens in (1, 3, 9):
            x = activations(tokens, 96, case.dtype)
            bias = -0.75 * case.products.multiply(packed.codes, x[:1], way=way)[0]
            out = case.products.multiply(packed.codes, x, bias, way)
            wanted = case.products.multiply(packed.codes, x * 0.25, way=way)[0].double()
            assert ((out[0].double() - wanted).abs() <= 3 * case.half_unit * bias.abs()).all()
            zero = case.products.multiply(packed.codes, torch.zeros_like(x), bias, way)
            assert torch.equal(zero, bias.expand_as(zero))


@for_cases
def test_a_linear_layer_has_its_kernel_add_the_bias(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another type, too: that of activations is asked for."""
    packed, _ = make(case.bits, (11, 96))
    products, shape = case.products, LinearShape(96, 11)
    bias = torch.randn(11, generator=torch.Generator().manual_seed(3))
    rule = rule_for(Processor(), case.bits, shape, "float32")
    linear = QuantizedLinear(packed, shape, bias, case.dtype, rule)
    monkeypatch.setattr(CudaPacked, "kernels", lambda self, dtype: products)
    x = activations(9, 96, case.dtype)
    wanted = products.multiply(packed.codes, x, bias.to(case.dtype))
    assert torch.equal(linear(x), wanted)
    assert not torch.equal(wanted, products.multiply(packed.codes, x))


@pytest.mark.parametrize(
    ("bits", "group", "held_bits"), [(4, 32, 4.625), (5, 32, 5.625), (6, 16, 6.5625)]
)
def test_bits_of_weights_in_super_blocks(bits: int, group: int, held_bits: float) -> None:
    shape = LinearShape(512, 8, group, stored_form=ScaleForm.SUPER_BLOCKS)
    rule = rule_for(Processor((8, 0)), bits, shape, "bfloat16")
    assert rule.name == f"cuda_{bits}bit"
    packed = BACKENDS[bits].from_canonical(of_super_blocks((8, 512), bits))
    assert 8 * packed.nbytes == 8 * rule.nbytes(shape, "bfloat16") == held_bits * 8 * 512


@pytest.mark.parametrize("case", SUPER_CASES)
def test_experts_of_super_blocks_are_multiplied_as_they_are_asked(case: Case) -> None:
    packed = trial(BACKENDS[case.bits], (120, 256), True, CPU)
    assert _asked_complaint(packed, case.products, case.dtype) is None


@tensor_cases
def test_what_is_not_a_number_stays_with_its_token(case: Case) -> None:
    packed, _ = make(case.bits, (11, 96))
    x = activations(11, 96, case.dtype)
    clean = case.products.multiply(packed.codes, x, way=TENSOR)
    x[3, 5], x[8, 40] = float("nan"), float("inf")
    out = case.products.multiply(packed.codes, x, way=TENSOR)
    spoilt = torch.zeros(11, dtype=torch.bool)
    spoilt[[3, 8]] = True
    assert torch.equal(out[~spoilt], clean[~spoilt])
    assert not out[spoilt].isfinite().any()


@tensor_cases
def test_split_sums_have_the_same_bits_in_any_order(case: Case) -> None:
    """Of threads and of blocks, of which the last of each tile merges: what counts them is zero
    again.
    """
    packed, _ = make(case.bits, (130, 544))
    x = activations(9, 544, case.dtype)
    kernels, results = case.kernels, []
    for seed in (0, 1, 2):
        kernels.driver.seed(seed)
        results.append(case.products.multiply(packed.codes, x, way=TENSOR))
    kernels.driver.seed(0)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@for_cases
def test_restored_in_blocks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices._BLOCK_WEIGHTS, "cpu", 5 * 96)
    packed, _ = make(case.bits, (21, 96))
    x = activations(30, 96, case.dtype)
    bias = torch.randn(21, generator=torch.Generator().manual_seed(3)).to(case.dtype)
    together = case.products.multiply(packed.codes, x, bias, RESTORED)
    monkeypatch.undo()
    assert torch.equal(case.products.multiply(packed.codes, x, bias, RESTORED), together)


@for_cases
def test_shapes_and_strides_of_activations(case: Case) -> None:
    packed, _ = make(case.bits, (16, 64))
    codes, products = packed.codes, case.products
    x = activations(6, 64, case.dtype)
    for way in products.ways:
        plain = products.multiply(codes, x, way=way)
        assert torch.equal(
            products.multiply(codes, x.view(2, 3, 64), way=way), plain.view(2, 3, 16)
        )
        assert torch.equal(products.multiply(codes, x.t().contiguous().t(), way=way), plain)
        shifted = torch.cat((torch.zeros(1, dtype=x.dtype), x.view(-1)))[1:].view(6, 64)
        assert shifted.data_ptr() % 16 != 0
        assert torch.equal(products.multiply(codes, shifted, way=way), plain)
        assert products.multiply(codes, x[:0].view(0, 1, 64), way=way).shape == (0, 1, 16)


@for_cases
def test_passes_the_self_test(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    products = case.products
    monkeypatch.setattr(CudaPacked, "kernels", lambda self, dtype: products)
    assert self_test(BACKENDS[case.bits], case.dtype, CPU) is None
    multiply: Callable[..., torch.Tensor] = products.multiply
    monkeypatch.setattr(products, "multiply", lambda codes, x, **way: multiply(codes, -x, **way))
    assert "is off by 200.0%" in str(self_test(BACKENDS[case.bits], case.dtype, CPU))


@tensor_cases_of_all_forms
def test_a_wrong_kernel_on_tensor_cores_is_found(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = case.products
    packed = trial(BACKENDS[case.bits], (192, 256), case.super_blocks, CPU)
    assert tensor_cores_complaint(packed, products, case.dtype) is None
    monkeypatch.setitem(products._ways, TENSOR, lambda product: product.out.zero_())
    complaint = tensor_cores_complaint(packed, products, case.dtype)
    assert complaint == "their product of 3 tokens is off by 100.0%"


@for_all_forms
@pytest.mark.parametrize("shape", [(8, 32), (11, 96), (9, 2080)])
def test_nothing_is_loaded_from_beside_the_tensors(case: Case, shape: tuple[int, int]) -> None:
    packed, _ = case.make(shape)
    kernels, products = case.kernels, case.products
    bias = torch.zeros(shape[0], dtype=case.dtype)
    for way in products.ways:
        x = activations(9, packed.in_features, case.dtype)
        for tensor in (x, packed.packed, packed.scales, bias):
            kernels.driver.allow(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes))
        try:
            products.multiply(packed.codes, x, bias, way)
            kernels.driver.allow_everything()
            kernels.driver.allow(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes))
            with pytest.raises(CudaError, match="700: illegal address"):
                products.multiply(packed.codes, x, bias, way)
        finally:
            kernels.driver.allow_everything()
            _arrived(CPU, kernels.stream).zero_()  # of the launch that was broken off


@tensor_cases
@pytest.mark.parametrize(("multiprocessors", "tokens"), [(1, 9), (5, 8)])
def test_bytes_that_blocks_read(case: Case, multiprocessors: int, tokens: int) -> None:
    """Weights once, activations once for each 128 rows, and what splits leave; scales of a few
    columns come in sectors that splits share.
    """
    packed, _ = make(case.bits, (256, 512))
    x = activations(tokens, 512, case.dtype)
    driver = case.kernels.driver
    driver.moved_bytes.restype = ctypes.c_size_t
    driver.moved_bytes()
    products = CudaProducts(case.kernels, case.dtype, multiprocessors)
    products.multiply(packed.codes, x, way=TENSOR)
    grid = Grid.of((256, 512, case.bits), tokens, multiprocessors)
    assert (grid.splits > 1) == (multiprocessors > 1)
    again = grid.splits * packed.scales.nbytes if grid.splits > 1 else 0
    counted = grid.read_bytes(packed.nbytes, x.nbytes)
    assert counted <= driver.moved_bytes() <= counted + again
    assert grid.read_bytes(packed.nbytes, 0) - grid.partial_bytes == packed.nbytes


def test_driver_errors_say_what_happened() -> None:
    packed, _ = make(4, (8, 32))
    x = torch.zeros(33, dtype=torch.float16)[1:].view(1, 32)
    product = Product(packed.codes, x, None, torch.zeros(1, 8, dtype=torch.float16))
    for way in (PACKED, TENSOR):
        with pytest.raises(CudaError, match="716: misaligned address"):
            FIRST[0].products._ways[way](product)
    with pytest.raises(CudaError, match="error 1: invalid value"):
        FIRST[0].kernels.launch("restore", 0)
