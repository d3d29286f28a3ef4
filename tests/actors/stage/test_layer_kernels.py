"""Kernels of our own layers against float64 and transformers' modules."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import BloomGelu
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from actors.attention.ragged import NewTokens
from actors.attention.stored import Stored, key_factors, quantized
from actors.stage.layers.cuda_layer import KERNELS, SOURCE, Norm, Turning
from quant.backends.cuda.driver import CudaError, compile_cuda, text_of
from tests.actors.own_kernels import (
    layer_kernels,
)
from tests.cuda_emulation import CPU, check_machine_code, needs_compiler, needs_nvrtc

HALF, BFLOAT = torch.float16, torch.bfloat16
NARROW, WIDE = (48, 16, HALF, False), (1048, 80, BFLOAT, True)
"""Width, head size, type and whether keys and values are codes: less than a block's threads take at
once, and more."""

FORMS = [
    *(NARROW, WIDE),
    *(
        pytest.param(form, marks=pytest.mark.rare)
        for form in ((4096, 128, HALF, True), (8, 8, BFLOAT, False), (2064, 256, HALF, False))
    ),
]


def draws(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_rounded(found: Tensor, exact: Tensor, roundings: float = 1) -> None:
    """Off by so many roundings to the type at most, and those of sums in float32."""
    eps = torch.finfo(found.dtype).eps / 2
    limit = roundings * eps * exact.abs() + 4e-6 * exact.abs().max()
    if found.dtype == HALF:
        limit += 2.0**-25  # half of its least step
    error = (found.double() - exact).abs()
    assert (error <= limit).all(), float((error / limit).max())


Form = tuple[int, int, torch.dtype, bool]


def norm_module(kind: str, width: int, dtype: torch.dtype) -> nn.Module:
    module: nn.Module = LlamaRMSNorm(width) if kind == "rms" else nn.LayerNorm(width)
    for seed, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    return module.to(dtype).requires_grad_(False)


def exact_norm(x: Tensor, module: nn.Module) -> Tensor:
    """In float64, of transformers' roundings that of RMSNorm before the weight."""
    wide, weight = x.double(), module.weight.double()
    if isinstance(module, nn.LayerNorm):
        scale = (wide.var(-1, correction=0, keepdim=True) + module.eps).rsqrt()
        return (wide - wide.mean(-1, keepdim=True)) * scale * weight + module.bias.double()
    scale = (wide.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
    return (wide * scale).to(x.dtype).double() * weight


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_sums_and_norms(kind: str, form: Form) -> None:
    width, dtype, kernels = form[0], form[2], layer_kernels(*form)
    modules = [norm_module(kind, width, dtype) for _ in range(2)]
    norms = [Norm.of(module) for module in modules]
    assert None not in norms
    x, y, z = (draws(3, width, dtype=dtype, seed=seed) for seed in range(3))
    for added, wanted in (((), x), ((y,), x + y), ((y, z), x + (y + z))):
        for count in range(not added, 3):
            total, normed = kernels.add(x, added, norms[:count])
            assert torch.equal(total, wanted)
            assert len(normed) == count
            for found, module in zip(normed, modules, strict=False):
                # where the float32 before the weight lies between two numbers, either will do
                check_rounded(found, exact_norm(wanted, module), 1 if kind == "layer" else 3)
                same = (found == module(wanted)).double().mean()
                assert same > 0.98, same


@needs_compiler
def test_norms_without_weights_and_rows_that_lie_at_odd_places() -> None:
    kernels = layer_kernels(*NARROW)
    plain = Norm.of(nn.LayerNorm(48, elementwise_affine=False))
    assert plain is not None
    x = draws(145, dtype=HALF)[1:].view(3, 48)
    _, (found,) = kernels.add(x, (), [plain])
    check_rounded(found, nn.functional.layer_norm(x.double(), (48,)))


def of_heads(
    form: Form, heads: tuple[int, int], fused: bool, tokens: int = 5
) -> tuple[NewTokens, NewTokens]:
    """Projections as linears leave them, and copies of them."""
    _, head_dim, dtype, _ = form
    if fused:
        whole = draws(tokens, heads[0] * 3 * head_dim, dtype=dtype)
        parts = whole.unflatten(-1, (-1, 3, head_dim)).unbind(2)
    else:
        parts = tuple(
            draws(tokens, count * head_dim, dtype=dtype, seed=seed).unflatten(-1, (-1, head_dim))
            for seed, count in enumerate((heads[0], heads[1], heads[1]))
        )
    return NewTokens(*parts), NewTokens(*(part.clone() for part in parts))


def turned(query: Tensor, key: Tensor, turning: Turning | None) -> tuple[Tensor, Tensor]:
    if turning is None:
        return query, key
    return apply_rotary_pos_emb(query, key, turning.cosines, turning.sines)


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("heads", "rotary", "fused", "normed", "factored"),
    [
        ((6, 2), 1.0, False, False, True),
        ((3, 3), 0.25, True, False, False),
        ((4, 1), 1.0, False, True, True),
        ((3, 3), 0.0, True, False, True),
        ((5, 5), 0.0, False, False, False),
    ],
)
def test_positions_and_the_write_of_keys_and_values(
    form: Form, heads: tuple[int, int], rotary: float, fused: bool, normed: bool, factored: bool
) -> None:
    """Equal bit for bit to transformers' rotation and to `quantized`; a token without a slot is
    written nowhere.
    """
    _, head_dim, dtype, coded = form
    new, before = of_heads(form, heads, fused)
    width = int(rotary * head_dim)
    angles = draws(2, 5, width // 2, dtype=torch.float32).repeat(1, 1, 2)
    turning = Turning(angles[0].cos().to(dtype), angles[0].sin().to(dtype)) if width else None
    modules = [norm_module("rms", head_dim, dtype) for _ in range(2)] if normed else []
    norms = [norm for norm in map(Norm.of, modules) if norm is not None]
    factors = None
    if factored and coded:
        largest = draws(heads[1], head_dim, dtype=torch.float32).abs().exp()
        factors = key_factors(largest, width).to(dtype)
    held = torch.int8 if coded else dtype
    shape = heads[1], 9, head_dim
    keys, values = Stored.empty(shape, held, CPU, factors), Stored.empty(shape, held, CPU)
    slots = torch.tensor([7, 2, -1, 0, 8], dtype=torch.int32)
    layer_kernels(*form).turn_and_store(new, turning, norms, slots, (keys, values))

    query, key = before.query, before.key
    if normed:
        query, key = modules[0](query), modules[1](key)
    query, key = turned(query, key, turning)
    check_equal(new.query, keys.asked(query), normed)
    check_equal(new.key, key, normed)
    assert torch.equal(new.value, before.value)
    for stored, rows in ((keys, new.key), (values, before.value)):
        divided = rows if stored.factors is None else rows.float() / stored.factors
        parts = quantized(divided) if coded else (rows,)
        for found, wanted in zip((stored.numbers, stored.scales), parts, strict=False):
            assert found is not None
            expected = torch.zeros_like(found)
            for row, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    expected[:, slot] = wanted[row]
            assert torch.equal(found, expected)


def check_equal(found: Tensor, wanted: Tensor, normed: bool) -> None:
    """Bit for bit, but behind norms, whose float32 may round to a neighbour before they turn."""
    if normed:
        error = (found.double() - wanted.double()).norm() / wanted.double().norm()
        assert error < torch.finfo(found.dtype).eps / 2
    else:
        assert torch.equal(found, wanted)


@needs_compiler
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0])
def test_codes_of_numbers_that_are_not_finite(value: float) -> None:
    """Their scale is not finite either, so that nobody takes the row for numbers."""
    new, _ = of_heads(WIDE, (2, 2), fused=False, tokens=1)
    new.key[0, 0, 3], new.value[0, 1] = value, 0.0
    keys, values = (Stored.empty((2, 1, 80), torch.int8, CPU) for _ in range(2))
    slots = torch.zeros(1, dtype=torch.int32)
    layer_kernels(*WIDE).turn_and_store(new, None, (), slots, (keys, values))
    assert keys.scales is not None
    assert bool(keys.scales[0, 0].isfinite()) == (value == 0)
    assert keys.scales[1, 0].isfinite()
    assert values.scales is not None
    assert torch.equal(values.scales[1], quantized(torch.zeros(1, 80))[1])


@needs_compiler
@pytest.mark.parametrize("form", [NARROW, WIDE])
@pytest.mark.parametrize(
    "name", ["silu", "gelu", "gelu_new", "relu", "quick_gelu", "bloom", "mish"]
)
def test_activations(name: str, form: Form) -> None:
    """Also those that the kernel does not know; what it multiplies is rounded first."""
    dtype, kernels = form[2], layer_kernels(*form)
    function = BloomGelu() if name == "bloom" else ACT2FN[name]
    x, up = (4 * draws(3, 1048, dtype=dtype, seed=seed) for seed in range(2))
    x[0, :3] = torch.tensor([0.0, -60.0, 60.0])
    exact = ACT2FN["gelu_new" if name == "bloom" else name](x.double())
    alone = kernels.activate(function, x.clone())
    check_rounded(alone, exact)
    assert torch.equal(kernels.activate(function, x.clone(), up), alone * up)
    fused = torch.cat([x, up], -1)
    assert torch.equal(kernels.activate(function, *fused.chunk(2, -1)), alone * up)


@needs_compiler
def test_the_order_of_threads_and_blocks_is_all_one() -> None:
    kernels = layer_kernels(*WIDE)
    norm = Norm.of(norm_module("layer", 1048, BFLOAT))
    assert norm is not None
    found = []
    for number in (0, 5, 11):
        kernels.kernels.driver.seed(ctypes.c_uint(number))
        total, normed = kernels.add(
            draws(3, 1048, dtype=BFLOAT), [draws(3, 1048, dtype=BFLOAT)], [norm]
        )
        new, _ = of_heads(WIDE, (2, 2), fused=True)
        keys, values = (Stored.empty((2, 5, 80), torch.int8, CPU) for _ in range(2))
        angles = draws(5, 80, dtype=BFLOAT)
        slots = torch.arange(5, dtype=torch.int32)
        kernels.turn_and_store(new, Turning(angles, angles), (), slots, (keys, values))
        found.append([total, *normed, new.query, keys.numbers, keys.scales, values.numbers])
    kernels.kernels.driver.seed(ctypes.c_uint(0))
    for one, other in pairwise(found):
        assert all(map(torch.equal, one, other))


@needs_nvrtc
@pytest.mark.parametrize(
    ("capability", "width", "head_dim", "coded"),
    [
        ((7, 0), 8192, 128, 1),
        *(
            pytest.param(*form, marks=pytest.mark.rare)
            for form in (
                *(((6, 0), 5120, 80, 1), ((8, 0), 4096, 128, 0), ((6, 1), 2560, 80, 0)),
                *(((7, 5), 14336, 112, 1), ((8, 6), 768, 64, 0)),
                *(((8, 9), 5120, 128, 1), ((9, 0), 16384, 256, 1)),
                *(((10, 0), 8192, 128, 0), ((12, 0), 4096, 128, 1)),
            )
        ),
    ],
)
def test_compiles_for_every_gpu_without_spills(
    capability: tuple[int, int], width: int, head_dim: int, coded: int
) -> None:
    definitions = {"BFLOAT16": int(capability >= (8, 0)), "HIDDEN_SIZE": width}
    definitions |= {"HEAD_DIM": head_dim, "CODED": coded}
    check_machine_code(SOURCE, KERNELS, capability, **definitions)


@needs_nvrtc
def test_sizes_that_it_is_not_written_for() -> None:
    definitions = {"BFLOAT16": 0, "HIDDEN_SIZE": 100, "HEAD_DIM": 64, "CODED": 0}
    with pytest.raises(CudaError, match="HEAD_DIM and HIDDEN_SIZE are multiples of 8"):
        compile_cuda(text_of(SOURCE), (7, 0), definitions)
