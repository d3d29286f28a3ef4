from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from quant.backends.base import CanonicalPacked, PackedWeight
from quant.backends.bnb import BnbNf4
from quant.backends.cpu import int4_few, int4_layout, int4_vectors, int4pack
from quant.backends.cpu.int4pack import Int3Pack, Int4Pack, Int5Pack, Int6Pack
from quant.backends.cpu.int8pack import Int8Pack, OneDnnW8A8
from quant.backends.kernel_classes import BACKENDS, self_test, usable_backend
from quant.backends.kernel_rule import KernelRule
from quant.backends.portable import Torch4Bit
from quant.backends.table import KERNEL_RULES
from quant.common.errors import CheckpointError, DeviceError, SpecError
from quant.devices import local_processor
from quant.numba_loops import has_numba
from quant.rounding.canonical import dequantize, quantize
from quant.rounding.importance import InputStatistics
from quant.rounding.rotation import LANES, rotate
from quant.rounding.ways import Rounding
from quant.rounding.weighted import column_importance
from quant.scheme import HEAD_BITWIDTHS, LinearShape

CPU = torch.device("cpu")
RULES = {rule.name: rule for rule in KERNEL_RULES if rule.name != "plain"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = (
    *((64, 64), (64, 128), (80, 256), (192, 320), (48, 96), (33, 100), (1, 1), (5, 7)),
    *((65, 4096), (272, 1024), (64, 48), (3, 16)),
)
"""(out, in): several groups, each group size, whole rows as groups, and what kernels refuse."""


def shapes_of(rule: KernelRule, dtype: str) -> list[tuple[int, int]]:
    """The shapes that the backend takes on this CPU."""
    here = local_processor(CPU)
    return [(rows, n) for rows, n in SHAPES if rule.supports(here, LinearShape(n, rows), dtype)]


KERNELS = [(rule, dtype) for rule in RULES.values() for dtype in DTYPES if shapes_of(rule, dtype)]
KERNEL_IDS = [f"{rule.name}-{dtype}" for rule, dtype in KERNELS]
LOCAL_RULES = list({rule.name: rule for rule, _ in KERNELS}.values())


def make(rule: KernelRule, dtype: str, shape: tuple[int, int]) -> tuple[torch.Tensor, PackedWeight]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).half()
    return weight, BACKENDS[rule.name].from_weight(weight, DTYPES[dtype], CPU)


def bound(name: str, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far each output may be from the product in float64.

    Each product is off by the rounding of the decoded weight and each output by its own: together
    at most 1.5 units of the type times sum |x| |w|; sums in float32 add `in` times its unit. At
    W8A8, a rotated activation is off by at most half a step of its token.
    """
    magnitude = x.abs() @ weight.abs().t()
    limit = magnitude * (
        1.5 * torch.finfo(dtype).eps + x.shape[-1] * torch.finfo(torch.float32).eps
    )
    if name == "onednn_w8a8":
        return limit + rotated_step(x) / 2 * rotated(weight).abs().sum(-1) + 1e-30
    return limit + 1e-30


def rotated(rows: torch.Tensor) -> torch.Tensor:
    """`rows` `[..., in]` as W8A8 mixes their features, in float64."""
    mixed = rotate(rows.double().reshape(-1, rows.shape[-1])) / math.sqrt(LANES)
    return mixed.view(rows.shape)


def rotated_step(x: torch.Tensor) -> torch.Tensor:
    """The step `[tokens, 1]` between two codes of a token at W8A8."""
    return 1.00001 * rotated(x).abs().amax(-1, keepdim=True) / 127


@pytest.mark.parametrize(("rule", "dtype"), KERNELS, ids=KERNEL_IDS)
def test_products_against_float64_and_bytes_of_the_rule(rule: KernelRule, dtype: str) -> None:
    """For every shape that the backend takes; no, few and many tokens are computed differently."""
    generator = torch.Generator().manual_seed(4)
    for shape in shapes_of(rule, dtype):
        weight, packed = make(rule, dtype, shape)
        assert packed.nbytes == rule.nbytes(LinearShape(shape[1], shape[0]), dtype)
        assert packed.nbytes == held_bytes(packed)
        meant = type(packed).represent(weight).double()
        for leading in ((0,), (1,), (5,), (2, 3), (70,), (130,)):
            x = torch.randn(*leading, shape[1], generator=generator).to(DTYPES[dtype])
            x[:1] *= 50  # one token far larger than the others
            out = packed.forward(x)
            assert out.dtype == x.dtype
            assert out.shape == (*leading, shape[0])
            error = (out.double() - x.double() @ meant.t()).abs()
            limit = bound(rule.name, x.double(), meant, DTYPES[dtype])
            assert (error <= limit).all(), (shape, leading)


@pytest.mark.parametrize("name", [rule.name for rule in LOCAL_RULES if rule.bits in HEAD_BITWIDTHS])
def test_single_rows_are_those_of_the_weight(name: str) -> None:
    """As an embedding looks them up, in any order and again."""
    rule = RULES[name]
    for shape in shapes_of(rule, "bfloat16"):
        weight, packed = make(rule, "bfloat16", shape)
        which = torch.tensor([shape[0] - 1, 0, shape[0] // 2, 0])
        found = packed.rows(which)
        assert found is not None
        wanted = type(packed).represent(weight)[which]
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        assert packed.rows(which[:0]).shape == (0, shape[1])


@pytest.mark.parametrize("name", ["cuda_8bit", "cuda_w8a8"])
def test_single_rows_of_kernels_for_gpus_are_those_of_the_weight(name: str) -> None:
    """Decoded by torch on any device."""
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(3))
    packed = BACKENDS[name].from_weight(weight, torch.bfloat16, CPU)
    which = torch.tensor([95, 0, 48, 0])
    wanted = BACKENDS[name].represent(weight)[which]
    torch.testing.assert_close(packed.rows(which), wanted, rtol=1e-6, atol=1e-6)


def held_bytes(packed: PackedWeight) -> int:
    """Bytes of the tensors among the fields of a packed weight."""
    fields = [getattr(packed, field.name) for field in dataclasses.fields(packed)]  # type: ignore[arg-type]
    return sum(
        torch.ops.mkldnn._nbytes(value)
        if value.layout == torch._mkldnn
        else value.untyped_storage().nbytes()
        for value in fields
        if isinstance(value, torch.Tensor)
    )


@pytest.mark.parametrize(("rule", "dtype"), KERNELS, ids=KERNEL_IDS)
def test_error_is_that_of_the_dequantized_weight(rule: KernelRule, dtype: str) -> None:
    """At most 1.1 times it where only the weight is rounded; at W8A8 twice it, at 8 bit."""
    for shape in {(272, 1024), (192, 320), (80, 256), (33, 100)} & {*shapes_of(rule, dtype)}:
        weight, packed = make(rule, dtype, shape)
        dequantized = type(packed).represent(weight).double()
        for tokens in (1, 8, 130):
            generator = torch.Generator().manual_seed(tokens)
            x = torch.randn(tokens, shape[1], generator=generator).to(DTYPES[dtype])
            wanted = x.double() @ weight.double().t()
            error = (packed.forward(x).double() - wanted).norm()
            own = (x.double() @ dequantized.t() - wanted).norm()
            assert error <= (2 if rule.name == "onednn_w8a8" else 1.1) * own


@pytest.mark.parametrize("rule", LOCAL_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_damaged_weights_are_refused(rule: KernelRule, value: float) -> None:
    weight = torch.zeros(128, 256)
    weight[70, 3] = value
    with pytest.raises(CheckpointError, match=r"1 of \d+ weight groups hold NaN, infinite"):
        BACKENDS[rule.name].from_weight(weight, torch.bfloat16, CPU)


@pytest.mark.parametrize("columns", [8, 100, 1000])
def test_int8pack_refuses_rows_that_its_kernel_reads_beyond(columns: int) -> None:
    with pytest.raises(SpecError, match=f"multiples of 16 input features, not {columns}"):
        Int8Pack.from_weight(torch.zeros(16, columns), torch.bfloat16, CPU)


@pytest.mark.parametrize(("rows", "columns"), [(80, 64), (64, 48)])
def test_5_and_6_bit_refuse_blocks_that_are_not_whole(rows: int, columns: int) -> None:
    refusal = f"and 32 input features, not {rows} and {columns}; use backend torch_6bit"
    with pytest.raises(SpecError, match=refusal):
        Int6Pack.from_weight(torch.zeros(rows, columns), torch.bfloat16, CPU)


def int3pack_and_twin(rows: int, columns: int) -> tuple[Int3Pack, Int4Pack]:
    """A 3-bit weight, and as 4-bit codes twice as large with half the scale, in bfloat16."""
    canonical = quantize(torch.randn(rows, columns, generator=torch.Generator().manual_seed(8)), 3)
    doubled = replace(canonical, codes=canonical.codes * 2, scale=canonical.scale / 2, bits=4)
    doubled = replace(doubled, narrow=False)
    return Int3Pack.from_canonical(canonical), Int4Pack.from_canonical(doubled)


@pytest.fixture
def library_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have few tokens multiplied by torch's kernel, with AVX2 too."""
    monkeypatch.setattr(int4_few, "takes", lambda bits, columns, tokens: False)
    monkeypatch.setattr(int4pack, "has_avx2_layout", lambda: False)


@pytest.mark.parametrize(
    ("rows", "columns"), [(16, 32), (48, 96), (64, 64), (208, 320), (1104, 2048), (64, 40960)]
)
@pytest.mark.parametrize("tokens", [5, 130])
@pytest.mark.usefixtures("library_alone")
def test_int3pack_restores_the_int4_layout_bit_by_bit(rows: int, columns: int, tokens: int) -> None:
    packed, twin = int3pack_and_twin(rows, columns)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(9)).bfloat16()
    assert torch.equal(packed.forward(x), twin.forward(x))
    assert packed.nbytes == RULES["int3pack"].nbytes(LinearShape(columns, rows), "bfloat16")


FEW_BY_OTHER_WAYS = [(2, 1, True), (2, 1, False), (13, 2, True), (13, 2, False)]
"""Tokens, threads, and whether pairs are multiplied; each is a loop to compile for seconds."""


@pytest.mark.skipif(not has_numba(), reason="needs numba")
@pytest.mark.parametrize("kind", [Int3Pack, Int4Pack, Int5Pack, Int6Pack])
@pytest.mark.parametrize(
    ("tokens", "threads", "pairs"),
    [(13, 2, None), *(pytest.param(*each, marks=pytest.mark.rare) for each in FEW_BY_OTHER_WAYS)],
)
def test_few_tokens_with_narrow_scales_against_float64(
    kind: type[Int3Pack | Int4Pack | Int5Pack | Int6Pack],
    tokens: int,
    threads: int,
    pairs: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Off by a rounding to the activations' type, and by sums in float32 of codes that 128 is added
    to. Of 13 tokens three of the last eight are none. `pairs`: None as this CPU multiplies.
    """
    if pairs and not int4_few.multiplies_pairs():
        pytest.skip("this CPU has no products of pairs")
    if pairs is not None:
        monkeypatch.setattr(int4_few, "multiplies_pairs", lambda: pairs)
    for rows, columns in ((320, 576), (64, 4096)):
        generator = torch.Generator().manual_seed(columns)
        weight = torch.randn(rows, columns, generator=generator)
        weight *= torch.logspace(-2, 0, rows)[:, None]
        canonical = quantize(weight + 0.01, kind.bits)
        packed, meant = kind.from_canonical(canonical), dequantize(canonical).double()
        terms = (128 + (1 << kind.bits)) * canonical.scale.double().amax(-1)
        x = torch.randn(tokens, columns, generator=generator).bfloat16()
        with monkeypatch.context() as patch:  # not where codes are fitted, by loops of one thread
            patch.setattr(torch, "get_num_threads", partial(int, threads))
            out = int4_few.multiply(kind.bits, x, packed.packed, packed.scales)
        exact, sizes = x.double() @ meant.t(), x.double().abs().sum(-1, keepdim=True)
        limit = 2**-8 * exact.abs() + 2**-24 * sizes * terms
        assert ((out.double() - exact).abs() <= limit).all()


@pytest.mark.skipif(not has_numba(), reason="needs numba")
@pytest.mark.parametrize("kind", [Int3Pack, Int4Pack])
def test_blocks_for_our_loops_where_torch_has_other_ones(
    kind: type[Int3Pack | Int4Pack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CPU with AVX2 alone; what GPUs restore is the weight, too."""
    monkeypatch.setattr(int4pack, "layout_is_known", lambda: False)
    monkeypatch.setattr(int4pack, "has_avx2_layout", lambda: True)
    monkeypatch.setattr(int4_layout, "layout_is_known", lambda: False)
    monkeypatch.setattr(int4_layout, "pack_codes", None)
    monkeypatch.setattr(int4_layout, "prefers_float32", lambda *_: True)
    monkeypatch.setattr(int4pack, "pack_codes", None)
    monkeypatch.setattr(int4_vectors, "has_wide_vectors", lambda: False)
    monkeypatch.setattr(int4_few, "has_wide_vectors", lambda: False)
    monkeypatch.setattr(int4_few, "multiplies_pairs", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    int4_few._product.cache_clear()
    generator = torch.Generator().manual_seed(7)
    canonical = quantize(torch.randn(256, 576, generator=generator), kind.bits)
    packed, meant = kind.from_canonical(canonical), dequantize(canonical)
    for tokens in (40, 7):
        x = torch.randn(tokens, 576, generator=generator).bfloat16()
        exact = x.double() @ meant.double().t()
        assert (packed.forward(x) - exact).norm() < 2**-8 * exact.norm()
    assert torch.equal(packed.restored_for(x), meant.bfloat16())
    int4_few._product.cache_clear()


@pytest.mark.parametrize(("tokens", "most"), [(63, True), (64, False)])
def test_more_tokens_are_left_to_decoded_rows(
    tokens: int, most: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4_few, "multiplies_pairs", lambda: True)
    assert int4_few.takes(4, 576, tokens) == most
    assert not int4_few.takes(3, 96, 1)  # a quarter is no whole run


@pytest.mark.usefixtures("library_alone")
def test_int3pack_keeps_no_more_scratch_memory_than_it_says() -> None:
    for columns in (64, 40960, 1024):
        int3pack_and_twin(128, columns)[0].forward(torch.zeros(5, columns, dtype=torch.bfloat16))
    held = int4pack._MEMORY._words
    assert held.nbytes <= 1.75 * max(1 << 20, 64 * 40960 // 2)


@pytest.mark.usefixtures("library_alone")
def test_int3pack_scratch_memory_serves_other_threads_and_inference_mode() -> None:
    cases = [int3pack_and_twin(rows, 512) for rows in (64, 640, 1280, 2560)]
    x = torch.randn(5, 512).bfloat16()

    def agrees(case: tuple[Int3Pack, Int4Pack]) -> bool:
        with torch.inference_mode():
            inside = case[0].forward(x)
        return torch.equal(inside, case[1].forward(x)) and torch.equal(inside, case[0].forward(x))

    with ThreadPoolExecutor(max_workers=4) as pool:
        assert all(pool.map(agrees, cases * 8))


@pytest.mark.parametrize("kind", [Int3Pack, Int4Pack])
def test_unknown_int4_layout_leaves_many_tokens_to_the_kernel(
    monkeypatch: pytest.MonkeyPatch, kind: type[CanonicalPacked]
) -> None:
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(10))
    packed = kind.from_weight(weight, torch.bfloat16, CPU)
    x = torch.randn(130, 256, generator=torch.Generator().manual_seed(11)).bfloat16()
    decoded = packed.forward(x)
    monkeypatch.setattr(int4_layout, "layout_is_known", lambda: False)
    monkeypatch.setattr(int4_layout.functional, "linear", None)
    assert (packed.forward(x) - decoded).norm() < 0.01 * decoded.norm()


@pytest.mark.skipif(not int4_layout.layout_is_known(), reason="this CPU has no AVX-512")
@pytest.mark.parametrize("kind", [Int3Pack, Int4Pack, Int5Pack, Int6Pack])
def test_codes_are_decoded_by_a_compiled_loop_as_by_torch(
    monkeypatch: pytest.MonkeyPatch, kind: type[CanonicalPacked]
) -> None:
    """Of 592 rows the last 16 are of another layout, which 5 and 6 bit do not have; both are one
    product but for its rounding.
    """
    draws = torch.Generator().manual_seed(12)
    weight = torch.randn(592 if kind.bits <= 4 else 576, 256, generator=draws)
    x = torch.randn(130, 256, generator=draws).bfloat16()
    packed, decoded = kind.from_weight(weight, torch.bfloat16, CPU), []
    monkeypatch.setattr(int4_few, "warm_up", lambda *_: None)  # seconds of compiling
    monkeypatch.setattr(int4_layout, "prefers_float32", lambda *_: False)
    packed.warm_up(256, torch.bfloat16)
    product, linear = torch.mm, torch.nn.functional.linear
    monkeypatch.setattr(torch, "mm", lambda a, b: decoded.append(b.t().clone()) or product(a, b))
    monkeypatch.setattr(
        int4_layout.functional, "linear", lambda a, b: decoded.append(b.clone()) or linear(a, b)
    )
    found = packed.forward(x)
    monkeypatch.setattr(int4_layout, "has_numba", lambda: False)
    expected = packed.forward(x)
    half = len(decoded) // 2
    assert torch.equal(torch.cat(decoded[:half]), torch.cat(decoded[half:]))
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("rows", [16, 48, 64, 80, 1040])
def test_int4pack_in_row_blocks_is_the_whole(rows: int) -> None:
    weight = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(5))
    codes = quantize(weight, 4).codes.int()
    whole = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    assert torch.equal(Int4Pack.from_weight(weight, torch.bfloat16, CPU).packed, whole)


@pytest.mark.skipif(
    "onednn_w8a8" not in {rule.name for rule in LOCAL_RULES}, reason="this CPU has no VNNI"
)
def test_w8a8_does_not_mix_tokens() -> None:
    """A token's result does not depend on its neighbours, so neither on batching or padding."""
    packed = OneDnnW8A8.from_weight(torch.randn(64, 128), torch.float32, CPU)
    x = torch.randn(9, 128)
    x[4] = 0
    together = packed.forward(x)
    assert torch.equal(together[4], torch.zeros(64))
    for token in range(9):
        assert torch.equal(packed.forward(x[token : token + 1])[0], together[token])


class Broken(Torch4Bit):
    """A kernel of half the scales."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


class Absent(Torch4Bit):
    """A kernel that this torch does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.no_such_operator(x)


@pytest.mark.parametrize(("kernel", "reason"), [(Broken, "off by"), (Absent, "no_such_operator")])
def test_failed_self_test_falls_back_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, kernel: type[PackedWeight], reason: str
) -> None:
    name = f"int4pack-{kernel.__name__}"
    monkeypatch.setitem(BACKENDS, name, kernel)
    with pytest.warns(RuntimeWarning, match=f"{name} is not usable .*{reason}"):
        chosen = usable_backend(name, 4, torch.bfloat16, CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert usable_backend(name, 4, torch.bfloat16, CPU) is chosen is Torch4Bit


@pytest.mark.parametrize(("rule", "dtype"), KERNELS, ids=KERNEL_IDS)
def test_self_test_passes_here(rule: KernelRule, dtype: str) -> None:
    assert self_test(BACKENDS[rule.name], DTYPES[dtype], CPU) is None


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_every_rule_names_a_kernel_of_its_bitwidth(rule: KernelRule) -> None:
    kernel = BACKENDS[rule.name]
    assert {"from_weight", "represent", "forward", "state", "warm_up"} <= {*dir(kernel)}
    assert not issubclass(kernel, CanonicalPacked) or kernel.bits == rule.bits


def test_missing_bitsandbytes_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    with pytest.raises(DeviceError, match=r"pip install -U 'llmpq\[bitsandbytes\]'"):
        BnbNf4.from_weight(torch.zeros(64, 64), torch.float16, CPU)


@pytest.mark.parametrize(("version", "is_old"), [("0.49.2", True), ("0.50.0.dev0", False)])
def test_bitsandbytes_without_kernels_for_several_rows_is_refused(
    version: str, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitsandbytes.__version__", version)
    refusal = "bitsandbytes is 0.49.2; plans count on the 4-bit kernels of 0.50: pip install -U"
    with pytest.raises(DeviceError, match=refusal) if is_old else nullcontext():
        BnbNf4.from_weight(torch.zeros(64, 64), torch.float16, CPU)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_bitsandbytes_sizes_and_products() -> None:
    """bitsandbytes runs on CPUs too, which is enough to check sizes and the calling convention."""
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(6))
    packed = BnbNf4.from_weight(weight, torch.float16, CPU)
    exponents = 2 * 96  # of the backend that may take its place
    assert packed.nbytes + exponents == RULES["bnb_nf4"].nbytes(LinearShape(128, 96), "float16")
    assert self_test(BnbNf4, torch.float16, CPU) is None


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("shape", [(24, 128), (9, 96), (5, 100)])
@pytest.mark.parametrize("known", [False, True])
def test_fitted_nf4_has_less_weighted_error(shape: tuple[int, int], known: bool) -> None:
    """9 x 96 has blocks across rows, 5 x 100 a shorter last one."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    squares = torch.rand(shape[1], generator=torch.Generator().manual_seed(8)) ** 6
    inputs = InputStatistics(squares, squares.sqrt()) if known else None
    importance = column_importance(inputs, shape[1])
    count = weight.numel() // 64 * 64
    errors = []
    for rounding in ("weighted", "nearest"):
        restored = BnbNf4.represent(weight, Rounding(rounding, inputs=inputs))
        squared = (restored - weight).square() * importance
        errors.append(squared.flatten()[:count].view(-1, 64).sum(1))
    assert (errors[0] <= errors[1] * (1 + 1e-5)).all()
    assert float(errors[0].sum() / errors[1].sum()) < (0.85 if known else 0.97)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("rounding", ["weighted", "nearest"])
def test_nf4_is_decoded_as_bitsandbytes_does(rounding: str) -> None:
    """Its own decoding on CPUs with AVX-512 takes blocks that lie in one row alone."""
    from bitsandbytes.functional import dequantize_4bit

    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(12))
    packed = BnbNf4.from_weight(weight, torch.float32, CPU, Rounding(rounding))
    theirs = dequantize_4bit(packed.packed, packed.quantized)
    ours = BnbNf4.represent(weight, Rounding(rounding))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_fitted_nf4_of_zeros_is_zero() -> None:
    assert not BnbNf4.represent(torch.zeros(4, 64), Rounding("weighted")).any()
