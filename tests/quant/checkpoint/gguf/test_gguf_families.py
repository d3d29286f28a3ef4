"""GGUF files of families with experts and with constant states, against the models that were
written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from llmpq.model_check import checked_shape
from planner.model.finding import model_shape
from quant.checkpoint.model_reference import resolve
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError, SpecError
from tests.actors.configs import EVERY_CONFIG, LAYERS, SHARED_CONFIGS, STATE_CONFIGS
from tests.actors.models import generate, random_prompts, references, save_tiny, stages_of
from tests.quant.checkpoint.gguf.written import Array, plain, write_gguf

_TYPES = [f"{kind}_attention" for kind in ("linear", "full") * 3][:LAYERS]
_YARN = {"rope_parameters": EVERY_CONFIG["deepseek_v3"].rope_parameters | {"mscale": 0.9}}
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_YARN, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _YARN,
    "glm4_moe": {},
    "gpt_oss": {"hidden_size": 64},  # whole blocks
    "gemma4-shared": {},
    "qwen3_next": {"mlp_only_layers": [], "layer_types": _TYPES},
    "qwen3_5_moe": {"layer_types": _TYPES},
}
"""Entries of tiny configurations that llama.cpp has no words for."""

RARE: dict[str, dict[str, Any]] = {
    **{
        name: {} for name in ("gemma4", "gemma4-experts", "granitemoe", "granitemoeshared", "olmo3")
    },
    "mixtral": {"sliding_window": None},
    "olmoe": {"clip_qkv": None},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_5": {"layer_types": _TYPES},
    "glm4_moe_lite": {
        "rope_interleave": True,
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * (LAYERS - 2),
    },
}


def tiny(name: str, folder: Path, **others: Any) -> Any:
    config = (EVERY_CONFIG | STATE_CONFIGS | SHARED_CONFIGS)[name]
    values = config.to_dict() | (CHANGES | RARE)[name] | others
    return save_tiny(folder, type(config).from_dict(values))


def check_weights(found: Checkpoint, model: Any) -> None:
    """Hold every tensor of `model` against those of the file, experts one by one."""
    names, tensors = {*found.names()}, model.state_dict()
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, tensor in tensors.items():
        if name in names:
            torch.testing.assert_close(found.read(name), tensor, rtol=1e-6, atol=2.4e-7)
            names.remove(name)
            continue
        stem, _, fused = name.rpartition(".")
        is_gate = fused == "gate_up_proj"
        for index, own in enumerate(tensor):
            parts = [
                f"{stem}.{index}.{p}_proj.weight"
                for p in (("gate", "up") if is_gate else ("down",))
            ]
            stored = [found.read(part) for part in parts]
            if model.config.model_type == "gpt_oss":
                wanted = [own.t()[first :: len(parts)] for first in range(len(parts))]
            else:
                wanted = list(own.chunk(len(parts)))
            assert all(torch.equal(a, b) for a, b in zip(stored, wanted, strict=True)), name
            names -= {*parts}
    assert not names


@pytest.mark.parametrize(
    "name", [*CHANGES, *(pytest.param(n, marks=pytest.mark.rare) for n in RARE)]
)
def test_the_model_that_was_written_comes_back(name: str, tmp_path: Path) -> None:
    model = tiny(name, tmp_path / "original")
    metadata = {"tokenizer.ggml.pre": "glm4"} if name == "glm4_moe_lite" else None
    file = write_gguf(model, tmp_path / "tiny.gguf", metadata=metadata)
    assert checked_shape(file).fingerprint() == model_shape(tmp_path / "original").fingerprint()
    check_weights(Checkpoint(file), model)
    prompts = random_prompts((5, 11))
    stages = stages_of(resolve(file), (0, 2, LAYERS), len(prompts), 20)
    expected = references(model, prompts, 5, ignore_eos=True)
    assert generate(stages, prompts, 5, prefill=2, decode=2) == expected


def test_gate_and_up_of_experts_in_one_tensor(tmp_path: Path) -> None:
    """As the converter writes them with `--fuse-gate-up-exps`."""
    model = tiny("qwen2_moe", tmp_path / "original")

    def fuse(tensors: dict[str, Array]) -> None:
        for layer in range(LAYERS):
            stem = f"blk.{layer}.ffn_"
            parts = [tensors.pop(f"{stem}{each}_exps.weight") for each in ("gate", "up")]
            tensors[f"{stem}gate_up_exps.weight"] = np.concatenate(parts, axis=1)

    file = write_gguf(model, tmp_path / "tiny.gguf", change=fuse)
    checked_shape(file)
    check_weights(Checkpoint(file), model)


def test_layers_that_predict_further_ahead_are_left_out(tmp_path: Path) -> None:
    model = tiny("glm4_moe", tmp_path / "original")

    def add(tensors: dict[str, Array]) -> None:
        last, more = (f"blk.{layer}." for layer in (LAYERS - 1, LAYERS))
        ahead = {n.replace(last, more): each for n, each in tensors.items() if n.startswith(last)}
        tensors |= ahead | {f"{more}nextn.eh_proj.weight": np.zeros((48, 96), np.float32)}

    metadata = {"glm4moe.block_count": LAYERS + 1, "glm4moe.nextn_predict_layers": 1}
    file = write_gguf(model, tmp_path / "tiny.gguf", metadata=metadata, change=add)
    assert checked_shape(file).layers == LAYERS
    check_weights(Checkpoint(file), model)


def test_experts_of_gpt_oss_in_four_bits(tmp_path: Path) -> None:
    """In blocks of MXFP4, as it is published."""
    kind = gguf.GGMLQuantizationType.MXFP4
    model = tiny("gpt_oss", tmp_path / "original")
    written: dict[str, Array] = {}

    def encode(name: str, weights: Array) -> tuple[Array, gguf.GGMLQuantizationType]:
        if not name.endswith("exps.weight"):
            return plain(name, weights)
        blocks = gguf.quantize(weights, kind)
        written[name] = gguf.dequantize(blocks, kind)
        return blocks, kind

    found = Checkpoint(write_gguf(model, tmp_path / "tiny.gguf", encode))
    checked_shape(found.place)
    for part in ("gate", "up", "down"):
        for expert in (0, 5):
            name = f"model.layers.3.mlp.experts.{expert}.{part}_proj.weight"
            wanted = written[f"blk.3.ffn_{part}_exps.weight"][expert]
            assert np.array_equal(found.read(name).numpy(), wanted)


def test_tensors_that_are_joined_are_named_as_in_the_file(tmp_path: Path) -> None:
    model = tiny("qwen3_next", tmp_path / "original")

    def cut(tensors: dict[str, Array]) -> None:
        del tensors["blk.2.attn_gate.weight"]

    file = write_gguf(model, tmp_path / "tiny.gguf", change=cut)
    message = r"tensor blk\.2\.attn_qkv\.weight and blk\.2\.attn_gate\.weight is \[80, 48\] but"
    with pytest.raises(CheckpointError, match=message):
        checked_shape(file)


def as_it_was(tensors: dict[str, Array]) -> None:
    """Keys and values of latents in one tensor."""
    for layer in range(LAYERS):
        stem = f"blk.{layer}.attn_"
        keys, values = tensors.pop(f"{stem}k_b.weight"), tensors.pop(f"{stem}v_b.weight")
        both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        tensors[f"{stem}kv_b.weight"] = np.ascontiguousarray(both.reshape(-1, both.shape[-1]))


def test_latents_of_files_from_before_heads_shared_them(tmp_path: Path) -> None:
    """Whose heads have sizes of their own, and whose metadata name neither scores nor groups."""
    model = tiny(
        "deepseek_v2", tmp_path / "original", topk_method="greedy", n_group=1, topk_group=1
    )
    config = model.config
    sizes = {
        "head_count_kv": config.num_attention_heads,
        "key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "value_length": config.v_head_dim,
        "key_length_mla": None,
        "value_length_mla": None,
    }
    metadata: dict[str, Any] = {f"deepseek2.attention.{key}": n for key, n in sizes.items()}
    for key in ("gating_func", "group_count", "group_used_count"):
        metadata[f"deepseek2.expert_{key}"] = None
    file = write_gguf(model, tmp_path / "tiny.gguf", metadata=metadata, change=as_it_was)
    assert checked_shape(file).fingerprint() == model_shape(tmp_path / "original").fingerprint()
    check_weights(Checkpoint(file), model)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"attention.temperature_scale": 0.1}, "attention.temperature_scale is 0.1"),
        ({"expert_gating_func": 3}, "expert_gating_func is 3; it must be 1 or 2, or left out"),
        ({"expert_count": None}, "deepseek2.expert_count is missing"),
        ({"attention.key_length_mla": 8}, r"key_length_mla is 8; it must be more than 8"),
        ({"expert_weights_norm": True}, "norm_topk_prob is True"),
    ],
)
def test_models_with_latents_that_are_not_run(
    metadata: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = tiny("deepseek_v2", tmp_path / "original")
    own = {f"deepseek2.{key}": value for key, value in metadata.items()}
    with pytest.raises(SpecError, match=words):
        checked_shape(write_gguf(model, tmp_path / "tiny.gguf", metadata=own))


def test_keys_of_latents_whose_columns_are_not_before_rows(tmp_path: Path) -> None:
    model = tiny("deepseek_v2", tmp_path / "original")

    def turn(tensors: dict[str, Array]) -> None:
        keys = tensors["blk.1.attn_k_b.weight"]
        tensors["blk.1.attn_k_b.weight"] = np.ascontiguousarray(keys.swapaxes(1, 2))

    message = r"tensor blk\.1\.attn_k_b\.weight and blk\.1\.attn_v_b\.weight is \[0, 12\] but"
    with pytest.raises(CheckpointError, match=message):
        checked_shape(write_gguf(model, tmp_path / "tiny.gguf", change=turn))
