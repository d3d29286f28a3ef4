from __future__ import annotations

import dataclasses
import importlib.util
import warnings

import pytest
import torch

from quant.backends.base import PackedWeight
from quant.backends.bnb import BnbNf4
from quant.backends.int4pack import Int4Pack
from quant.backends.onednn_w8a8 import OneDnnW8A8
from quant.backends.registry import BACKENDS, self_test, usable_backend
from quant.backends.torch_4bit import Torch4Bit
from quant.canonical import quantize
from quant.errors import DeviceError
from quant.processor import local_processor
from quant.scheme import KERNEL_RULES, KernelRule, LinearShape

CPU = torch.device("cpu")
RULES = {rule.name: rule for rule in KERNEL_RULES if rule.name != "plain"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = ((64, 64), (64, 128), (80, 256), (192, 320), (48, 96), (33, 100), (1, 1), (5, 7))
"""(out, in): several groups, each group size, whole rows as groups, and what kernels refuse."""

CASES = [
    (rule, dtype, shape)
    for rule in RULES.values()
    for dtype in DTYPES
    for shape in SHAPES
    if rule.supports(local_processor(CPU), LinearShape(shape[1], shape[0]), dtype)
]
IDS = [f"{rule.name}-{dtype}-{rows}x{columns}" for rule, dtype, (rows, columns) in CASES]


def make(rule: KernelRule, dtype: str, shape: tuple[int, int]) -> tuple[torch.Tensor, PackedWeight]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).half()
    return weight, BACKENDS[rule.name].from_weight(weight, DTYPES[dtype], CPU)


def bound(name: str, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far each output may be from the product in float64.

    Each product is off by the rounding of the decoded weight and each output by its own: together
    at most 1.5 units of the type times sum |x| |w|; sums in float32 add `in` times its unit. At
    W8A8, an activation is off by at most half a step of its token.
    """
    magnitude = x.abs() @ weight.abs().t()
    limit = magnitude * (
        1.5 * torch.finfo(dtype).eps + x.shape[-1] * torch.finfo(torch.float32).eps
    )
    if name == "onednn_w8a8":
        step = x.abs().amax(-1, keepdim=True) / 127
        limit = limit + step / 2 * weight.abs().sum(-1)
    return limit + 1e-30


@pytest.mark.parametrize(("rule", "dtype", "shape"), CASES, ids=IDS)
def test_product_against_float64(rule: KernelRule, dtype: str, shape: tuple[int, int]) -> None:
    weight, packed = make(rule, dtype, shape)
    meant = type(packed).represent(weight).double()
    generator = torch.Generator().manual_seed(4)
    for leading in ((1,), (5,), (2, 3), (70,)):
        x = torch.randn(*leading, shape[1], generator=generator).to(DTYPES[dtype])
        x[0] *= 50  # one token far larger than the others
        out = packed.forward(x)
        assert out.dtype == x.dtype
        assert out.shape == (*leading, shape[0])
        error = (out.double() - x.double() @ meant.t()).abs()
        assert (error <= bound(rule.name, x.double(), meant, DTYPES[dtype])).all()


@pytest.mark.parametrize(("rule", "dtype", "shape"), CASES, ids=IDS)
def test_bytes_are_those_of_the_rule(rule: KernelRule, dtype: str, shape: tuple[int, int]) -> None:
    _, packed = make(rule, dtype, shape)
    assert packed.nbytes == rule.nbytes(LinearShape(shape[1], shape[0]), dtype)
    fields = [getattr(packed, field.name) for field in dataclasses.fields(packed)]
    tensors = [value for value in fields if isinstance(value, torch.Tensor)]
    held = sum(
        torch.ops.mkldnn._nbytes(tensor)
        if tensor.layout == torch._mkldnn
        else tensor.untyped_storage().nbytes()
        for tensor in tensors
    )
    assert held == packed.nbytes


@pytest.mark.parametrize("rows", [16, 48, 64, 80, 1040])
def test_int4pack_in_row_blocks_is_the_whole(rows: int) -> None:
    weight = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(5))
    codes = quantize(weight, 4).codes.int()
    whole = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    assert torch.equal(Int4Pack.from_weight(weight, torch.bfloat16, CPU).packed, whole)


@pytest.mark.skipif(
    "onednn_w8a8" not in {rule.name for rule, _, _ in CASES}, reason="this CPU has no VNNI"
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


@pytest.mark.parametrize(("rule", "dtype", "shape"), CASES, ids=IDS)
def test_no_tokens(rule: KernelRule, dtype: str, shape: tuple[int, int]) -> None:
    _, packed = make(rule, dtype, shape)
    assert packed.forward(torch.zeros(0, shape[1], dtype=DTYPES[dtype])).shape == (0, shape[0])


class Broken(Torch4Bit):
    """A kernel that forgets the zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Torch4Bit(self.nibbles, self.scale, torch.zeros_like(self.zero)).forward(2 * x)


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


@pytest.mark.parametrize(("rule", "dtype", "shape"), CASES, ids=IDS)
def test_self_test_passes_here(rule: KernelRule, dtype: str, shape: tuple[int, int]) -> None:
    assert self_test(BACKENDS[rule.name], DTYPES[dtype], CPU) is None


def test_every_rule_has_a_backend() -> None:
    assert set(BACKENDS) == set(RULES)


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed"
)
def test_missing_bitsandbytes_says_what_to_install() -> None:
    with pytest.raises(DeviceError, match=r"pip install 'llmpq\[bitsandbytes\]'"):
        BnbNf4.from_weight(torch.zeros(64, 64), torch.float16, CPU)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("name", ["bnb_nf4", "bnb_int8"])
def test_bitsandbytes_sizes_and_products(name: str) -> None:
    """bitsandbytes runs on CPUs too, which is enough to check sizes and the calling convention."""
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(6))
    packed = BACKENDS[name].from_weight(weight, torch.float16, CPU)
    assert packed.nbytes == RULES[name].nbytes(LinearShape(128, 96), "float16")
    assert self_test(BACKENDS[name], torch.float16, CPU) is None
