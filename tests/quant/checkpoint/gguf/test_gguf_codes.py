"""Codes of GGUF blocks that stages keep, against what the package makes of the blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig

from quant.backends.base import decode_held, held_scales
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError
from quant.rounding.canonical import dequantize
from quant.rounding.gptq_format import to_canonical
from tests.actors.models import save_tiny
from tests.quant.checkpoint.gguf.blocks import TYPES, coded, in_blocks
from tests.quant.checkpoint.gguf.test_gguf_weights import small_llama
from tests.quant.checkpoint.gguf.written import Array, write_gguf

KINDS = ("Q4_0", "Q4_1", "Q4_K")
ALL_KINDS = (*KINDS, "Q5_0", "Q5_1", "Q5_K", "Q6_K")
LAYER = "model.layers.1"


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_codes_stand_for_what_the_package_reads(kind: str, tmp_path: Path) -> None:
    """Blocks of any bytes but for their halves; also some rows, and queries in another order."""
    model, rng = small_llama(tmp_path / "original", hidden=256), np.random.default_rng(0)
    halves = 1 if kind.endswith("_0") or kind == "Q6_K" else 2

    def encode(name: str, weights: Array) -> tuple[Array, gguf.GGMLQuantizationType]:
        if weights.ndim == 1:
            return weights, TYPES.F32
        block, block_bytes = gguf.GGML_QUANT_SIZES[TYPES[kind]]
        shape = len(weights), weights.shape[1] // block, block_bytes
        blocks = rng.integers(0, 256, shape, np.uint8)
        scales = rng.uniform(-1e-2, 1e-2, (*shape[:2], halves)).astype(np.float16)
        scales[3] = 0
        behind = 208 if kind == "Q6_K" else 0
        blocks[..., behind : behind + 2 * halves] = scales.view(np.uint8)
        return blocks.reshape(len(weights), -1), TYPES[kind]

    checkpoint = Checkpoint(write_gguf(model, tmp_path / "tiny.gguf", encode))
    for module, rows in (("self_attn.q_proj", 256), ("mlp.down_proj", 256), ("mlp.up_proj", 256)):
        name = f"{LAYER}.{module}"
        wanted = checkpoint.read(f"{name}.weight")
        codes = checkpoint.read_codes(name, (rows, 256))
        groups = 16 if kind == "Q6_K" else 8
        assert (codes.bits, codes.scale.shape) == (int(kind[1]), (rows, groups))
        assert torch.equal(codes.dequantize(), wanted)
        for kept in (slice(8, 100), [3, 200, 4]):
            assert torch.equal(
                checkpoint.read_codes(name, (rows, 256), kept).dequantize(), wanted[kept]
            )
        canonical = to_canonical(codes).canonical
        error = (dequantize(canonical) - wanted).norm() / wanted.norm()
        assert error <= (0 if kind.endswith("K") else 1e-7)
        if kind.endswith("K"):
            held = held_scales(canonical)
            assert torch.equal(decode_held(canonical.codes, held, codes.bits), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_powers_of_two_are_exact(kind: str, tmp_path: Path) -> None:
    model = small_llama(tmp_path / "original", hidden=256)
    checkpoint = Checkpoint(write_gguf(model, tmp_path / "tiny.gguf", in_blocks(kind)))
    for module in ("self_attn.k_proj", "mlp.gate_proj"):
        name = f"{LAYER}.{module}"
        wanted, original = checkpoint.read(f"{name}.weight"), model.get_submodule(name).weight
        canonical = to_canonical(checkpoint.read_codes(name, tuple(wanted.shape))).canonical
        zero = canonical.zero
        assert zero is not None
        for held in (torch.bfloat16, torch.float16):
            own = canonical.scale.to(held), zero.to(held)
            assert torch.equal(own[0].float(), canonical.scale.float())
            assert torch.equal(own[1].float(), zero.float())
        assert torch.equal(dequantize(canonical), wanted)
        assert (wanted - original).norm() < 0.25 * original.norm()


def test_what_stands_beside_codes_has_eight_bits(tmp_path: Path) -> None:
    """Layers that are mostly of other blocks are decoded, all of them."""
    model = small_llama(tmp_path / "original", hidden=256)
    kinds = {"blk.0": "Q4_K", "blk.1": "Q4_1", "blk.2": "Q8_0"}
    beside = {"attn_v": "Q8_0", "ffn_down": "Q5_0", "attn_k": "F16"}

    def encode(name: str, weights: Array) -> tuple[Array, gguf.GGMLQuantizationType]:
        kind = kinds.get(name[:5], "Q8_0")
        kind = next((own for part, own in beside.items() if part in name), kind)
        kind = "F32" if weights.ndim == 1 else kind
        own = coded(weights, kind) if kind == "Q4_K" else gguf.quantize(weights, TYPES[kind])
        return own, TYPES[kind]

    checkpoint = Checkpoint(write_gguf(model, tmp_path / "tiny.gguf", encode))
    bits: dict[str, Any] = {}
    for name in checkpoint.names():
        found = checkpoint.coded(name.removesuffix(".weight"))
        bits[name] = None if found is None or found.linear is None else found.linear.bits
    kept = {"mlp.gate_proj": 4, "mlp.up_proj": 4, "self_attn.q_proj": 4, "self_attn.o_proj": 4}
    kept |= {"mlp.down_proj": 5, "self_attn.v_proj": 8}
    for layer in range(3):
        for name, own in kept.items():
            assert bits[f"model.layers.{layer}.{name}.weight"] == (own if layer < 2 else None)
        for name in ("self_attn.k_proj", "input_layernorm"):
            assert bits[f"model.layers.{layer}.{name}.weight"] is None
    assert bits["model.embed_tokens.weight"] is None
    assert checkpoint.has_codes(f"{LAYER}.mlp.down_proj")
    assert not checkpoint.has_codes(f"{LAYER}.self_attn.v_proj")


def test_gate_and_up_of_experts_are_held_alike(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=199, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=32,
    )  # fmt: skip
    model = save_tiny(tmp_path / "original", config)
    for of, wanted in (((), (4, 4, 4)), (("ffn_gate_exps",), (8, 8, 4))):
        encode = in_blocks("Q4_0", "Q8_0", of)
        checkpoint = Checkpoint(write_gguf(model, tmp_path / f"{len(of)}.gguf", encode))
        experts = f"{LAYER}.mlp.experts.3"
        found = [checkpoint.coded(f"{experts}.{part}_proj") for part in ("gate", "up", "down")]
        assert tuple(each and each.linear and each.linear.bits for each in found) == wanted


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = small_llama(tmp_path / "original", hidden=64)

    def encode(name: str, weights: Array) -> tuple[Array, gguf.GGMLQuantizationType]:
        own, kind = in_blocks("Q4_1")(name, weights)
        if name == "blk.1.attn_q.weight":
            own[0, 2:4] = np.array([np.inf], np.float16).view(np.uint8)
        return own, kind

    checkpoint = Checkpoint(write_gguf(model, tmp_path / "tiny.gguf", encode))
    with pytest.raises(CheckpointError, match=r"tensor model.layers.1.self_attn.q_proj in .*tiny"):
        checkpoint.read_codes(f"{LAYER}.self_attn.q_proj", (64, 64))
    with pytest.raises(CheckpointError, match="the model's configuration wants"):
        checkpoint.read_codes(f"{LAYER}.self_attn.o_proj", (64, 32))
