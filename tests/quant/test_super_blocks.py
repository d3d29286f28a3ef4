"""Scales of K-quants as their files have them, held against what the package `gguf` reads."""

from __future__ import annotations

from functools import partial

import gguf
import numpy as np
import pytest
import torch

from quant.backends.kernel_classes import BACKENDS
from quant.backends.table import rule_for
from quant.checkpoint.gguf.blocks import SUPER_CODES
from quant.numba_loops import has_numba
from quant.rounding.canonical import CanonicalWeight, dequantize, part_of
from quant.scheme import COLUMNS, ROWS, Cut, LinearShape, Processor, ScaleForm, part_shape
from quant.super_blocks import decode_scales

KINDS = {"Q4_K": 4, "Q5_K": 5, "Q6_K": 6}
BITS_OF_ALL = {"Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625}


def blocks_of(kind: str, rows: int, columns: int) -> tuple[CanonicalWeight, torch.Tensor]:
    """Blocks of any bytes, and the weight `[rows, columns]` that they stand for; of some d is
    negative, or 0.
    """
    rng, number = np.random.default_rng(columns), gguf.GGMLQuantizationType[kind]
    size, nbytes = gguf.GGML_QUANT_SIZES[number]
    blocks = rng.integers(0, 256, (rows, columns // size, nbytes), np.uint8)
    heads = slice(208, 210) if kind == "Q6_K" else slice(0, 4)
    halves = rng.normal(0, 1e-3, (*blocks.shape[:2], 2)).astype(np.float16)
    halves[1] = 0
    halves[2] *= np.float16(1e-2)  # below the least normal number
    blocks[..., heads] = halves.view(np.uint8)[..., : heads.stop - heads.start]
    blocks[3, 0, 192:208] = 128  # in Q6_K a factor of -128
    blocks = blocks.reshape(rows, -1)
    codes, held = (torch.from_numpy(each) for each in SUPER_CODES[kind](blocks))
    bits, held = KINDS[kind], held.view(torch.int8)
    scale, low = decode_scales(held, bits)
    zero = low + (1 << (bits - 1)) * scale
    group = columns // scale.shape[1]
    canonical = CanonicalWeight(codes, scale, zero, bits, group, held=held)
    return canonical, torch.from_numpy(gguf.dequantize(blocks, number))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [64, 256])
def test_weights_are_those_of_the_file_bit_by_bit(kind: str, rows: int) -> None:
    """Decoded by torch, and of the larger one by a compiled loop."""
    canonical, wanted = blocks_of(kind, rows, 512)
    assert torch.equal(dequantize(canonical), wanted)
    x, shape = torch.eye(512), LinearShape(512, rows, canonical.group, stored_form=canonical.form)
    for name in (f"torch_{canonical.bits}bit", f"int{canonical.bits}pack"):
        packed = BACKENDS[name].from_canonical(canonical)  # type: ignore[attr-defined]
        assert packed.nbytes * 8 == BITS_OF_ALL[kind] * wanted.numel()
        rule = rule_for(Processor(), canonical.bits, shape, "bfloat16", name)
        assert (rule.name, rule.nbytes(shape, "bfloat16")) == (name, packed.nbytes)
        assert torch.equal(packed.restored_for(x), wanted)
        assert torch.equal(packed.forward(x.bfloat16()).t(), wanted.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("begin", "end"), [(256, 768), (128, 512), (16, 272)])
def test_parts_are_held_alike_where_blocks_are_whole(kind: str, begin: int, end: int) -> None:
    """Else scales lose what 16 bit do not hold, as those of any other weight do."""
    canonical, wanted = blocks_of(kind, 64, 1024)
    whole = LinearShape(1024, 64, canonical.group, stored_form=canonical.form)
    for cut in (Cut(COLUMNS, begin, end, 1024), Cut(ROWS, 16, 48, 64)):
        part, shape = part_of(canonical, cut), part_shape(whole, cut)
        assert (part.form, part.group) == (shape.form, shape.group)
        found, own = dequantize(part), wanted[cut.index]
        if part.form is ScaleForm.SUPER_BLOCKS:
            assert torch.equal(found, own)
        assert (found - own).norm() < 3e-3 * own.norm()


@pytest.mark.skipif(not has_numba(), reason="needs numba")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "threads"), [(13, 1), pytest.param(2, 2, marks=pytest.mark.rare)]
)
def test_few_tokens_against_float64(
    kind: str, tokens: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by a rounding to the activations' type, and by sums in float32 of codes that 128 is added
    to; many tokens by that of weights too.
    """
    monkeypatch.setattr(torch, "get_num_threads", partial(int, threads))
    canonical, meant = blocks_of(kind, 128, 1024)
    packed = BACKENDS[f"int{canonical.bits}pack"].from_canonical(canonical)  # type: ignore[attr-defined]
    terms = (128 + (1 << canonical.bits)) * canonical.scale.double().abs().amax(-1)
    for count, rounding in ((tokens, 0), (130, 2**-9)):
        x = torch.randn(count, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
        exact = x.double() @ meant.double().t()
        products = x.double().abs() @ meant.double().abs().t()
        sizes = x.double().abs().sum(-1, keepdim=True)
        limit = 2**-8 * exact.abs() + 2**-23 * sizes * terms + rounding * products
        assert ((packed.forward(x).double() - exact).abs() <= limit).all()
