"""Loops of our own layers on CPUs against float64 and transformers' modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from actors.stage.layers import cpu_layer
from actors.stage.layers.cpu_layer import LayerLoops
from actors.stage.layers.cuda_layer import Norm, Turning
from actors.stage.layers.own_layers import own_layers
from tests.actors.configs import LAYERS
from tests.actors.models import save_tiny, stages_of
from tests.actors.own_kernels import WITH_OWN_LAYERS
from tests.actors.stage.test_layer_kernels import (
    check_equal,
    check_rounded,
    draws,
    exact_norm,
    norm_module,
    of_heads,
    turned,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ROWS, WIDTH = 5, 72


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few numbers are shared too where there are two threads."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu_layer, "_LEAST_SHARED", 1)
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_sums_and_norms(kind: str, dtype: torch.dtype) -> None:
    loops = LayerLoops(dtype)
    modules = [norm_module(kind, WIDTH, dtype) for _ in range(2)]
    norms = [norm for norm in map(Norm.of, modules) if norm is not None]
    x, y, z = (draws(ROWS, WIDTH, dtype=dtype, seed=seed) for seed in range(3))
    for added, wanted in (((), x), ((y,), x + y), ((y, z), x + (y + z))):
        for count in range(3):
            total, normed = loops.add(x, added, norms[:count])
            assert torch.equal(total, wanted)
            assert len(normed) == count
            for found, module in zip(normed, modules, strict=False):
                check_rounded(found, exact_norm(wanted, module), 1 if kind == "layer" else 3)
    plain = Norm.of(nn.LayerNorm(WIDTH, elementwise_affine=False))
    assert plain is not None
    _, (found,) = loops.add(x, (), [plain])
    check_rounded(found, nn.functional.layer_norm(x.double(), (WIDTH,)))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary", [0, 8, 32])
@pytest.mark.parametrize("is_normed", [False, True])
def test_positions_turn_heads(dtype: torch.dtype, rotary: int, is_normed: bool) -> None:
    """As transformers rounds them, bit for bit; a part of a head's channels, or all."""
    new, before = of_heads((WIDTH, 32, dtype, False), (4, 2), fused=False)
    angles = draws(2, 5, rotary // 2, dtype=torch.float32).repeat(1, 1, 2)
    turning = Turning(angles[0].cos().to(dtype), angles[0].sin().to(dtype)) if rotary else None
    modules = [norm_module("rms", 32, dtype) for _ in range(2)]
    query, key = before.query, before.key
    for heads, module in zip((new.query, new.key), modules, strict=True):
        LayerLoops(dtype)._turn(heads, turning, Norm.of(module) if is_normed else None)
    if is_normed:
        query, key = modules[0](query), modules[1](key)
    query, key = turned(query, key, turning)
    for found, wanted in ((new.query, query), (new.key, key)):
        if dtype == torch.float32:
            torch.testing.assert_close(found, wanted)
        else:
            check_equal(found, wanted, is_normed)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "relu"])
def test_activations(name: str, dtype: torch.dtype) -> None:
    """What is multiplied is rounded first; halves of one product lie apart."""
    loops, function = LayerLoops(dtype), ACT2FN[name]
    x, up = (4 * draws(ROWS, WIDTH, dtype=dtype, seed=seed) for seed in range(2))
    x[0, :4] = torch.tensor([0.0, -60.0, 60.0, -200.0])
    alone = loops.activate(function, x.clone())
    check_rounded(alone, function(x.double()))
    both = loops.activate(function, x.clone(), up)
    check_rounded(both, function(x.double()) * up.double(), 3)
    halves = torch.cat([x, up], -1).chunk(2, -1)
    check_rounded(loops.activate(function, *halves), function(x.double()) * up.double(), 3)
    x[1, 0] = torch.nan
    assert loops.activate(function, x.clone(), up)[1, 0].isnan()


@pytest.mark.parametrize("wrong", [torch.ones(WIDTH).bfloat16(), torch.ones(2 * WIDTH)[::2]])
def test_what_loops_cannot_read_is_refused(wrong: torch.Tensor) -> None:
    """They are given addresses alone: of another type they would read what lies behind it."""
    with pytest.raises(ValueError, match=r"contiguous tensor of torch\.float32 is needed"):
        LayerLoops(torch.float32).add(torch.ones(2, WIDTH), (), [Norm(wrong, None, 1e-5, True)])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.rare)])
@pytest.mark.parametrize("name", WITH_OWN_LAYERS)
def test_stages_compute_by_them(tmp_path: Path, name: str, dtype: str) -> None:
    """Their tokens are held against `generate` by `test_token_equality`."""
    from tests.actors.configs import EVERY_CONFIG

    save_tiny(tmp_path, EVERY_CONFIG[name])
    (stage,) = stages_of(tmp_path, (0, LAYERS), 4, 20, dtype=dtype)
    assert len(own_layers(stage._model)) == LAYERS
